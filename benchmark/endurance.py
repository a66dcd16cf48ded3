"""Sessions in frame mode for a quarter of an hour, with all kinds of sound.

    python -m benchmark.endurance --json out.json
    python -m benchmark.endurance --kills thinker@300,thinker@600 --json out.json

Two sessions with each of six sounds: speech, two voices at once, silence, near silence, noise and
music. Frames are empty while a killed stage restarts; they are counted separately from empty frames
at other times, of which there should be none (workload W6).
"""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import psutil

from benchmark.frames.sessions import run_sessions
from benchmark.frames.sounds import endless_sounds
from benchmark.frames.stream import FrameRow, Stream
from benchmark.load.options import read_options
from benchmark.load.process_usage import MIB
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess

WORKLOADS = Path(__file__).parent / "workloads"
START_TIMEOUT_S = 300.0
_MEMORY_EVERY_S = 10.0
_MINUTE_S = 60.0
# Results of the last frames may arrive after the end.
_PATIENCE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    kills: STAGE@SECONDS, separated by commas.
    back_s: time after a kill in which empty frames are counted as its effect.
    """

    sessions: int = 12
    seconds: float = 900.0
    kills: str = ""
    back_s: float = 60.0
    frame_ms: int = 960
    max_tokens: int = 4
    pool_tokens: int = 16384
    window_tokens: int = 384
    model_path: str = "demo-random"
    clips: str = str(WORKLOADS / "clips")
    seed: int = 1
    json: str = ""

    @property
    def killed(self) -> list[tuple[str, float]]:
        pairs = [text.split("@") for text in self.kills.split(",") if text]
        return [(stage, float(at_s)) for stage, at_s in pairs]


async def watch_memory(pid: int, began_s: float, samples: list[tuple[float, float]]) -> None:
    """Proportional memory of a server and all its processes, in MiB: shared pages count once."""
    while True:
        total = 0
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        samples.append((round(time.monotonic() - began_s, 1), round(total / MIB, 1)))
        await asyncio.sleep(_MEMORY_EVERY_S)


async def kill(pid: int, stage: str, at_s: float) -> None:
    """Send SIGKILL to a stage's own process, at_s seconds from now.

    Raises:
        LookupError: if there is no such stage.
    """
    await asyncio.sleep(at_s)
    for process in psutil.Process(pid).children(recursive=True):
        if " ".join(process.cmdline()).startswith(f"sglang_live::{stage}/"):
            process.kill()
            return
    raise LookupError(f"no stage {stage}")


async def endure(server: ServerProcess, options: Options) -> dict:
    kinds = endless_sounds(Path(options.clips), options.seed)
    names = list(islice(cycle(kinds), options.sessions))
    began_s = time.monotonic()
    memory: list[tuple[float, float]] = []
    watching = asyncio.create_task(watch_memory(server.pid, began_s, memory))
    killing = [asyncio.create_task(kill(server.pid, *killed)) for killed in options.killed]
    streams, began_s, _ = await run_sessions(
        server,
        sounds=[kinds[name] for name in names],
        every_s=0.1,
        lasts_s=options.seconds,
        detection={
            "type": "frames",
            "frame_ms": options.frame_ms,
            "max_tokens": options.max_tokens,
        },
        model=Path(options.model_path).name,
    )
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await asyncio.gather(*killing)
    return summary(
        dict(zip(range(len(names)), names, strict=True)), streams, began_s, memory, options
    )


def summary(
    names: dict[int, str],
    streams: list[Stream],
    began_s: float,
    memory: list[tuple[float, float]],
    options: Options,
) -> dict:
    end_s = options.seconds - _PATIENCE_S
    lost = [r for s in streams for r in s.unanswered(began_s) if r.due_s < end_s]
    rows = [*(row for stream in streams for row in stream.rows), *lost]
    without = [row for row in rows if row.latency_ms is None]
    away = [(at_s, at_s + options.back_s) for _, at_s in options.killed]

    def is_away(row: FrameRow) -> bool:
        return any(a <= row.due_s < b for a, b in away)

    last_s = {
        number: max((r.due_s for r in rows if r.session == number and r.latency_ms), default=0.0)
        for number in names
    }
    return {
        "frames": len(rows),
        "late": sum(row.outcome == "late" for row in rows),
        "without_result": sum(not is_away(row) for row in without),
        "without_result_while_a_stage_was_away": sum(map(is_away, without)),
        "away_s": [_away_s(rows, a, b) for a, b in away],
        "alive_at_the_end": sum(
            at_s > end_s - 5 * options.frame_ms / 1000 for at_s in last_s.values()
        ),
        "ended_early": [s.ended_early for s in streams if s.ended_early],
        "by_sound": _by_sound(names, rows),
        "by_minute": _by_minute(rows, memory, options.seconds),
        "memory": memory,
    }


def _away_s(rows: list[FrameRow], killed_s: float, until_s: float) -> float | None:
    """Time from a kill until every session of that moment has a result of a later frame."""
    first: dict[int, float] = {}
    for row in rows:
        if row.due_s >= killed_s and row.latency_ms is not None:
            answered_s = row.due_s + row.latency_ms / 1000
            first[row.session] = min(first.get(row.session, np.inf), answered_s)
    lost = {row.session for row in rows if killed_s <= row.due_s < until_s}
    return round(max(first.values()) - killed_s, 2) if lost <= first.keys() else None


def _by_sound(names: dict[int, str], rows: list[FrameRow]) -> list[dict]:
    found = []
    for name in dict.fromkeys(names.values()):
        some = [row for row in rows if names[row.session] == name]
        found.append({"sound": name, "frames": len(some), **_latency(some)})
    return found


def _by_minute(
    rows: list[FrameRow], memory: list[tuple[float, float]], seconds: float
) -> list[dict]:
    found = []
    for minute in range(int(np.ceil(seconds / _MINUTE_S))):
        a, b = minute * _MINUTE_S, (minute + 1) * _MINUTE_S
        some = [row for row in rows if a <= row.due_s < b]
        used = [mib for at_s, mib in memory if a <= at_s < b]
        found.append(
            {
                "minute": minute,
                "frames": len(some),
                **_latency(some),
                "memory_mib": float(np.median(used)) if used else None,
            }
        )
    return found


def _latency(rows: list[FrameRow]) -> dict:
    values = [row.latency_ms for row in rows if row.latency_ms is not None]
    p50, p99 = np.percentile(values, (50, 99)).round(1).tolist() if values else (None, None)
    return {"without_result": len(rows) - len(values), "p50_ms": p50, "p99_ms": p99}


def main() -> None:
    options = read_options(Options(), __doc__)
    pool = f"--thinker.max-total-tokens={options.pool_tokens}"
    args = (pool, "--retention-window", str(options.window_tokens))
    with ServerProcess(options.model_path, "all", args, START_TIMEOUT_S) as server:
        found = asyncio.run(endure(server, options))
    print(json.dumps({name: value for name, value in found.items() if name != "memory"}, indent=1))
    if options.json:
        document = {"benchmark": "endurance", **facts(), "config": config_of(options), **found}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
