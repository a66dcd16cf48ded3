"""CPU time of the journal per turn: one gateway's calls with it and without.

    python -m benchmark.journal_cost --sessions 8 --rounds 6 --json out.json
    python -m benchmark.journal_cost --journal valkey://127.0.0.1:6379

The gateway's own calls in this process, with recorded speech and an orchestrator whose responses
are a recording; users, sockets and stages cost little. Time is virtual: it passes when nothing is
left to do, so that a busy machine writes as often as an idle one, and a turn takes milliseconds.
Blocks with and without journal alternate. The cost is the difference of their process times, with
all threads. A Valkey server's own time is not in it.
"""

import argparse
import asyncio
import gc
import json
import logging
import selectors
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmark.gateway_servers.gateway import FIRST_AUDIO_S, FakeOrchestrator
from benchmark.load.provenance import facts
from lab.load_client.utterance import append_message, silence_message
from sglang_live.client import clip
from sglang_live.clock import MonotonicClock
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.protocol import realtime_link
from sglang_live.interaction.silero import CONTEXT_SAMPLES, SpeechScores, SpeechState, SpeechWindows
from sglang_live.journal.journal import Journal, open_store
from sglang_live.journal.records import FleetKey
from sglang_live.journal.store import Kept, Outcome, Store, Write
from sglang_live.telemetry.metrics import GatewayMetrics

CLIP = Path(__file__).parent / "workloads" / "clips" / "librivox_0870.flac"
# Of silence until a turn ends, and of quiet behind a response.
SILENCE_S, REST_S = 0.5, 0.2
FRAMES_PER_MESSAGE = 5
WARM_UP_TURNS = 4
# Of the pauses between words, relative to full scale, with the clip's loudness.
_QUIET = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field. A block is `turns` turns of each session; a round is one per arm.

    journal: URL of its store; "": a file in a folder for temporary files.
    vad: the server finds the ends of turns, which costs more than all else; without, users commit
        their speech, and send no silence.
    """

    sessions: int = 8
    turns: int = 12
    rounds: int = 6
    said_s: float = 2.0
    reply_s: float = 3.0
    journal: str = ""
    vad: bool = False

    @property
    def turn_s(self) -> float:
        return self.said_s + SILENCE_S + FIRST_AUDIO_S + self.reply_s + REST_S


class VirtualTime(selectors.DefaultSelector):
    """Time of the process's clocks, which passes when the event loop has nothing to do.

    n_real: things that take real time, for which it stands still.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = time.monotonic()
        self.n_real = 0

    def select(self, timeout: float | None = None) -> Any:
        if self.n_real:
            return super().select(None if timeout else 0)
        ready = super().select(0)
        if not ready and timeout:
            self.now_s += timeout
        return ready

    async def real(self, work: Awaitable[Any]) -> Any:
        self.n_real += 1
        try:
            return await work
        finally:
            self.n_real -= 1


class Loop(asyncio.SelectorEventLoop):
    def __init__(self, virtual: VirtualTime):
        super().__init__(virtual)
        self._virtual = virtual

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, work: Callable[..., Any], *args: Any
    ) -> Any:
        future = super().run_in_executor(executor, work, *args)
        self._virtual.n_real += 1
        future.add_done_callback(self._has_ended)
        return future

    def _has_ended(self, _: object) -> None:
        self._virtual.n_real -= 1


class Waited:
    """A store whose answers take real time. n_writes: that sessions were in."""

    def __init__(self, store: Store, virtual: VirtualTime):
        self._store, self._virtual = store, virtual
        self.n_writes = self.n_steps = 0

    async def open(self) -> None:
        await self._virtual.real(self._store.open())

    async def write(self, writes: Sequence[Write], keep_s: float) -> list[Outcome]:
        self.n_writes += len(writes)
        self.n_steps += 1
        outcomes: list[Outcome] = await self._virtual.real(self._store.write(writes, keep_s))
        return outcomes

    async def read(self, session_id: str) -> Kept | None:
        return await self._virtual.real(self._store.read(session_id))

    async def take(self, session_id: str, epoch: int, token: str) -> bool:
        return await self._virtual.real(self._store.take(session_id, epoch, token))

    async def delete(self, session_id: str, epoch: int) -> None:
        await self._virtual.real(self._store.delete(session_id, epoch))

    async def close(self) -> None:
        await self._virtual.real(self._store.close())


class LoudnessModel:
    """What is loud is speech: a model's own cost would hide the journal's."""

    def initial_state(self) -> SpeechState:
        return SpeechState(np.zeros(1), np.zeros(1))

    def score(self, asked: Sequence[SpeechWindows]) -> list[SpeechScores]:
        return [(self._probabilities(windows), state) for windows, state in asked]

    def _probabilities(self, windows: np.ndarray) -> np.ndarray:
        loud = np.abs(windows[:, CONTEXT_SAMPLES:]).mean(axis=1) > _QUIET
        return np.where(loud, 0.95, 0.01).astype(np.float32)


class Inline:
    """As SpeechScorer, in the event loop: threads of their own would add noise."""

    def __init__(self, model: LoudnessModel):
        self.model = model

    async def score(self, windows: np.ndarray, state: SpeechState) -> SpeechScores:
        return self.model.score([(windows, state)])[0]

    def close(self) -> None:
        """There is no thread."""


class User:
    """A client in this process, and its socket."""

    def __init__(self, messages: list[str], quiet_s: float):
        """quiet_s: behind them, after a commit; 0: the server finds the end of speech."""
        self._messages, self._quiet_s = messages, quiet_s
        self._incoming: asyncio.Queue[str | None] = asyncio.Queue()
        self.n_responses = self.n_events = 0
        self.is_lost = False

    async def receive(self) -> str | None:
        return await self._incoming.get()

    async def send(self, frame: str) -> None:
        self.n_events += 1
        self.n_responses += '"type":"response.done"' in frame

    async def close(self, code: int, reason: str) -> None:
        if code != 1000:
            raise RuntimeError(f"a call was closed: {code} {reason}")

    def tell(self, kind: str, **fields: Any) -> None:
        self._incoming.put_nowait(json.dumps({"type": kind, **fields}))

    async def speak(self, turns: int) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for _ in range(turns):
            for message in self._messages:
                self._incoming.put_nowait(message)
                due_s += FRAMES_PER_MESSAGE * clip.FRAME_S
                await asyncio.sleep(due_s - loop.time())
            if self._quiet_s:
                self.tell("input_audio_buffer.commit")
                self.tell("response.create")
                due_s += self._quiet_s
                await asyncio.sleep(due_s - loop.time())

    def leave(self) -> None:
        self._incoming.put_nowait(None)


@dataclass(slots=True)
class Arm:
    """cpu_ms, writes: per turn of each round. n_events: that clients got in a turn."""

    name: str
    cpu_ms: list[float]
    writes: list[float]
    transactions: list[float]
    records: list[float]
    kilobytes: list[float]
    n_events: list[float]


class Gateway:
    """One arm: the calls of all users, with a journal or without."""

    def __init__(self, name: str, options: Options, virtual: VirtualTime, folder: Path):
        self.arm = Arm(name, [], [], [], [], [], [])
        self._options = options
        self.store: Waited | None = None
        self.journal: Journal | None = None
        if name == "journal":
            url = options.journal or f"sqlite:{folder}/journal"
            self.store = Waited(open_store(url), virtual)
            self.journal = Journal(self.store, FleetKey(b"k" * 32), MonotonicClock(), keep_s=3600.0)
        messages = _messages(options)
        quiet_s = 0.0 if options.vad else options.turn_s - options.said_s
        self.users = [User(messages, quiet_s) for _ in range(options.sessions)]

    async def open(self, exits: AsyncExitStack) -> None:
        if self.journal is not None:
            await self.journal.start()
            exits.push_async_callback(self.journal.close)
        parts = GatewayParts(
            orchestrator=FakeOrchestrator(self._options.reply_s),
            config=GatewayConfig(),
            speech_model=LoudnessModel(),
            metrics=GatewayMetrics(CollectorRegistry()),
            journal=self.journal,
        )
        parts.scorer = Inline(LoudnessModel())
        running = [asyncio.create_task(realtime_link(user, parts).run()) for user in self.users]

        async def end() -> None:
            for user in self.users:
                user.leave()
            await asyncio.gather(*running)

        exits.push_async_callback(end)
        detection = {"type": "server_vad", "silence_duration_ms": round(1000 * SILENCE_S)}
        found = detection if self._options.vad else None
        session = {
            "type": "realtime",
            "resumable": True,
            "instructions": "Be brief. " * 40,
            "audio": {"input": {"turn_detection": found}},
        }
        for user in self.users:
            user.tell("session.update", session=session)

    async def turns(self, n: int) -> None:
        """Of all users, spread over a turn's time."""

        async def begin(user: User, late_s: float) -> None:
            await asyncio.sleep(late_s)
            await user.speak(n)

        step_s = self._options.turn_s / len(self.users)
        await asyncio.gather(*(begin(user, i * step_s) for i, user in enumerate(self.users)))

    async def measure(self) -> None:
        n, before = self._options.turns * len(self.users), self._counts()
        gc.collect()
        began_s = time.process_time()
        await self.turns(self._options.turns)
        cpu_ms = 1000 * (time.process_time() - began_s) / n
        self.arm.cpu_ms.append(round(cpu_ms, 4))
        made = [(now - then) / n for now, then in zip(self._counts(), before, strict=True)]
        if made[0] != 1:
            raise RuntimeError(f"{made[0]:.3f} responses in a turn")
        names = ("n_events", "writes", "transactions", "records", "kilobytes")
        for name, value in zip(names, made[1:], strict=True):
            getattr(self.arm, name).append(round(value, 3))

    def _counts(self) -> tuple[float, ...]:
        n_responses = sum(user.n_responses for user in self.users)
        n_events = sum(user.n_events for user in self.users)
        if self.journal is None or self.store is None:
            return n_responses, n_events, 0, 0, 0, 0
        counts, store = self.journal.counts, self.store
        return (
            *(n_responses, n_events, store.n_writes, store.n_steps),
            *(counts.written, counts.written_bytes / 1000),
        )


def _messages(options: Options) -> list[str]:
    n_said = round(options.said_s * clip.SAMPLE_RATE_HZ)
    pcm = clip.load_pcm(CLIP)[: 2 * n_said]
    said = [append_message(frames) for frames in clip.frames(pcm, FRAMES_PER_MESSAGE)]
    n_all = round(options.turn_s / clip.FRAME_S / FRAMES_PER_MESSAGE) if options.vad else 0
    return said + [silence_message(FRAMES_PER_MESSAGE)] * (n_all - len(said))


async def run(options: Options, virtual: VirtualTime) -> list[Arm]:
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as exits:
            gateways = [
                Gateway(name, options, virtual, Path(folder)) for name in ("without", "journal")
            ]
            for gateway in gateways:
                await gateway.open(exits)
                await gateway.turns(WARM_UP_TURNS)
            gc.freeze()
            for n in range(options.rounds):
                for gateway in gateways[:: 1 if n % 2 else -1]:
                    await gateway.measure()
        return [gateway.arm for gateway in gateways]


def costs_ms(arms: list[Arm]) -> list[float]:
    """Of a turn's journal, by round."""
    without, journal = arms
    return [b - a for a, b in zip(without.cpu_ms, journal.cpu_ms, strict=True)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.journal_cost", description=(__doc__ or "").splitlines()[0]
    )
    for name, default in asdict(Options()).items():
        action = argparse.BooleanOptionalAction if isinstance(default, bool) else "store"
        kind = {} if isinstance(default, bool) else {"type": type(default)}
        parser.add_argument(f"--{name}", action=action, default=default, **kind)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = vars(parser.parse_args(argv))
    path = args.pop("json")
    options = Options(**args)
    logging.basicConfig(level=logging.WARNING)
    virtual = VirtualTime()
    real, time.monotonic = time.monotonic, lambda: virtual.now_s
    try:
        with asyncio.Runner(loop_factory=lambda: Loop(virtual)) as runner:
            arms = runner.run(run(options, virtual))
    finally:
        time.monotonic = real
    costs = costs_ms(arms)
    for arm in arms:
        means = {k: round(statistics.fmean(v), 3) for k, v in asdict(arm).items() if k != "name"}
        print(f"{arm.name}: {means}")
    cost = statistics.median(costs)
    speech_s = options.said_s + options.reply_s
    print(f"journal, ms of CPU per turn by round: {', '.join(f'{c:.3f}' for c in costs)}")
    print(
        f"median {cost:.3f} ms per turn: {cost / speech_s:.3f} per second of its speech, "
        f"{cost / options.turn_s:.3f} per second of the session"
    )
    if path is not None:
        document = {
            "benchmark": "journal_cost",
            **facts(),
            "options": asdict(options) | {"journal": options.journal.partition(":")[0]},
            "arms": [asdict(arm) for arm in arms],
            "cost_ms": [round(c, 4) for c in costs],
        }
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
