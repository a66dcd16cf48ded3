"""One run: a fresh server, its callers, what both did."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.load.arrivals import CallerPlan, load_reply_gaps, plan_callers
from benchmark.load.caller import Caller, TurnRow
from benchmark.load.config import LoadConfig, Run
from benchmark.load.process_usage import ProcessUsage, UsageMeter
from benchmark.load.server import ServerProcess
from sglang_live.client import clip
from sglang_live.client.session_options import SessionOptions
from sglang_live.clock import MonotonicClock


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one run yielded.

    Attributes:
        wall_s: from the first caller's start to the end of the last turn.
        late_frames: share of the callers' audio frames sent over 50 ms late. Above some
            percent the load generator was short of CPU, and the times are not the server's.
    """

    run: Run
    rows: list[TurnRow]
    wall_s: float
    server_start_s: float
    late_frames: float
    usage: dict[str, ProcessUsage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """The clips by name, as 24 kHz PCM16, and the gaps people leave before they reply."""

    speech: dict[str, bytes]
    reply_gaps_s: np.ndarray

    @classmethod
    def load(cls, config: LoadConfig) -> "Workload":
        files = sorted(config.clips.glob("*.flac"))
        if not files:
            raise ValueError(f"no .flac clips in {config.clips}")
        speech = {file.stem: clip.load_pcm(file) for file in files}
        return cls(speech, load_reply_gaps(config.reply_gaps))

    def plans(self, config: LoadConfig, run: Run) -> list[CallerPlan]:
        return plan_callers(
            n_callers=run.sessions,
            n_turns=config.turns,
            clips=sorted(self.speech),
            reply_gaps_s=self.reply_gaps_s,
            seed=config.seed,
            repeat=run.repeat,
            open_loop_rps=config.open_loop_rps,
            arrival_shape=config.arrival_shape,
        )


def measure(config: LoadConfig, run: Run, workload: Workload) -> RunResult:
    """Start a server for this run, put the load on it, stop it."""
    plans = workload.plans(config, run)
    with ServerProcess(
        config.model_path, run.policies, config.server_args, config.start_timeout_s
    ) as server:
        options = SessionOptions(
            url=server.url,
            # A server names its model after the last part of the path.
            model=Path(config.model_path).name,
            turn_timeout_s=config.turn_timeout_s,
        )
        meter = UsageMeter(server.pid)
        callers = asyncio.run(_put_load(plans, workload.speech, options, meter))
        start_s = server.start_s
    rows = [row for caller in callers for row in caller.rows]
    return RunResult(
        run=run,
        rows=rows,
        wall_s=max(row.end_s for row in rows) - min(row.start_s for row in rows),
        server_start_s=start_s,
        late_frames=sum(c.frames_late for c in callers)
        / max(1, sum(c.frames_sent for c in callers)),
        usage=meter.usage(),
    )


async def _put_load(
    plans: list[CallerPlan], speech: dict[str, bytes], options: SessionOptions, meter: UsageMeter
) -> list[Caller]:
    clock = MonotonicClock()
    callers = [Caller(plan, speech, options, clock) for plan in plans]
    sampling = asyncio.create_task(meter.keep_sampling())
    try:
        async with asyncio.TaskGroup() as group:
            for caller in callers:
                group.create_task(caller.run())
    finally:
        sampling.cancel()
        meter.sample()
    return callers


def result_to_json(result: RunResult) -> dict[str, Any]:
    return {
        "repeat": result.run.repeat,
        "sessions": result.run.sessions,
        "policies": result.run.policies,
        "wall_s": round(result.wall_s, 3),
        "server_start_s": round(result.server_start_s, 3),
        "late_frames": round(result.late_frames, 5),
        "processes": {
            name: {
                "n_processes": usage.n_processes,
                "cpu_s": usage.cpu_s,
                "peak_rss_mib": usage.peak_rss_mib,
            }
            for name, usage in result.usage.items()
        },
        "turns": [row.to_json() for row in result.rows],
    }
