"""Cost of a tick of frame mode besides the engine's own step, by sessions due in it.

    python -m benchmark.tick_cost --json out.json

let go    the metronome sorts the due sessions and wakes them (orchestrator/metronome.py)
ask       their turns' messages, each a frame and the keys of its history, onto the socket
order     the policies' round in the engine's scheduler, with all of them waiting (policy/decide.py)

Batching in the engine is SGLang's own, and part of its step; `benchmark.collapse` measures that and
the whole frame.
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmark.load.provenance import facts
from sglang_live.clock import MonotonicClock
from sglang_live.core import AudioPart, HistoryItem, TextPart, TurnRequest
from sglang_live.orchestrator.metronome import Metronome
from sglang_live.orchestrator.moves import MovableJob
from sglang_live.orchestrator.stage_jobs import ThinkerJob
from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.policies import Policies
from sglang_live.policy.view import StageRates, StageView
from sglang_live.stages.supervisor import Replica
from sglang_live.stages.transport.client import StageClient

DUE = (16, 64, 256, 1024)
_FRAME_MS = 480
# Frames, with their responses, that a window of 2,048 tokens holds.
_HISTORY = 220


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    n_due: int
    p50_ms: float
    p99_ms: float


def row(what: str, n: int, times_s: list[float]) -> Row:
    p50, p99 = np.percentile([1e3 * t for t in times_s], (50, 99))
    return Row(what, n, round(float(p50), 4), round(float(p99), 4))


async def let_go(n: int, repeats: int) -> Row:
    rng = np.random.default_rng(1)
    clock, times_s = MonotonicClock(), []
    for _ in range(repeats):
        metronome = Metronome(clock, tick_s=3600.0)
        due = rng.random(n)
        waiting = [asyncio.create_task(metronome.tick(float(at_s))) for at_s in due]
        while len(metronome._due) < n:
            await asyncio.sleep(0)
        began_s = time.perf_counter()
        metronome._start_due()
        times_s.append(time.perf_counter() - began_s)
        metronome._ticking.cancel()
        await asyncio.gather(*waiting)
    return row("let go", n, times_s)


def order(n: int, repeats: int) -> Row:
    policies = RoundPolicy.of(Policies(order="urgency", pacing=True))
    rng = np.random.default_rng(1)
    nothing = np.zeros(n, bool)
    view = StageView(
        now_s=1000.0,
        occupancy=0.5,
        free_tokens=100_000,
        prefill_running=False,
        rates=StageRates(round_s=0.015),
        waiting=~nothing,
        paused=nothing,
        since_s=1000.0 - rng.exponential(0.1, n),
        arrived_s=1000.0 - rng.exponential(0.1, n),
        buffered_s=np.zeros(n),
        started=nothing,
        kv_tokens=np.zeros(n, np.int64),
        prefill_tokens=np.full(n, 20),
        managed=~nothing,
    )
    times_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        policies.decide(view)
        times_s.append(time.perf_counter() - began_s)
    return row("order", n, times_s)


@dataclass(eq=False)
class _Link:
    """To a stage that is no supervisor's."""

    stage: StageClient
    known: set[str]

    @property
    def replica(self) -> Replica:
        raise AssertionError("its job does not move")

    def client(self) -> StageClient:
        return self.stage


async def ask(n: int, repeats: int) -> Row:
    """No peer reads: the socket's queue holds all messages."""
    history = tuple(
        HistoryItem(key=f"key_{i:032x}", role="user", parts=(TextPart("x"),))
        for i in range(_HISTORY)
    )
    pcm = np.zeros(16 * _FRAME_MS, np.int16)
    times_s = []
    with tempfile.TemporaryDirectory() as folder:
        client = StageClient("stage", f"ipc://{folder}/stage", same_host=True)
        for repeat in range(repeats):
            turns = []
            for i in range(n):
                said = HistoryItem(key=f"{repeat}-{i}", role="user", parts=(AudioPart(pcm),))
                turn = TurnRequest(
                    turn_id=f"{repeat}-{i}",
                    instructions="",
                    history=(*history, said),
                    voice="",
                    wants_audio=False,
                    max_output_tokens=4,
                )
                turns.append(turn)
            known = {item.key for item in history}
            began_s = time.perf_counter()
            for turn in turns:
                link = _Link(client, set(known))
                async with MovableJob(link, turn.turn_id) as job:
                    await job.begin(ThinkerJob(job, turn, "s", {})._begin)
            times_s.append(time.perf_counter() - began_s)
        await client.close()
    return row("ask", n, times_s)


async def measure(repeats: int) -> list[Row]:
    rows = []
    for n in DUE:
        rows += [await let_go(n, repeats), await ask(n, max(3, repeats // 20)), order(n, repeats)]
        for found in rows[-3:]:
            print(
                f"{found.what:8} {found.n_due:>5} due  P50 {found.p50_ms:8.3f} ms  "
                f"P99 {found.p99_ms:8.3f} ms",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(measure(args.repeats))
    if args.json:
        document = {
            "benchmark": "tick_cost",
            **facts(),
            "config": {"repeats": args.repeats, "frame_ms": _FRAME_MS, "history": _HISTORY},
            "rows": [asdict(found) for found in rows],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
