"""Cost of the gateway process per session, against a minimal server of the same stack.

    python -m benchmark.gateway_cost --sessions 8 --seconds 20 --json out.json

Both servers get the same users in the same run: microphones at real-time pace that send a recorded
clip, wait for the response and send it again. The gateway is the real one with a recording for
responses; the echo server returns as many bytes of audio. The costs of the stages and of the
orchestrator are not included.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.gateway_servers.process import ServerProcess
from benchmark.gateway_servers.users import Traffic, Users, period
from benchmark.load.provenance import facts
from sglang_live.client import clip
from sglang_live.clock import MonotonicClock

CLIPS = Path(__file__).parent / "workloads" / "clips"
WARM_UP_S = 2.0
N_RSS = 10
# Between the end of a clip and the next one, besides the response: detection and a breath.
PAUSE_S = 1.5
# With a larger share of late frames the machine was short of CPU for users and server.
LATE_LIMIT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field.

    echo_seconds: for the echo server, whose figures do not change with time. None: as `seconds`.
    frames_per_message: frames of 20 ms in a message; browsers and phones send several at once.
    deflate: offer WebSocket compression, as the websockets package does by default.
    """

    sessions: int = 8
    seconds: float = 20.0
    echo_seconds: float | None = None
    repeats: int = 1
    reply_s: float = 3.0
    frames_per_message: int = 1
    deflate: bool = True

    def __post_init__(self):
        counts = (self.sessions, self.repeats, self.frames_per_message)
        times_s = (self.seconds, self.echo_seconds or self.seconds, self.reply_s)
        if min(counts) < 1 or min(times_s) <= 0:
            raise ValueError("all numbers must be positive")


@dataclass(frozen=True, slots=True)
class Cost:
    """One arm of one repeat.

    audio_s: audio of all sessions together, sent to the server during the measurement.
    cpu_ms_per_s: CPU time of the server process per second of one session.
    lag_ms: P50, P99 and maximum lag of the server's event loop.
    behind_ms: P50, P99 and maximum time from a turn's last audio to the event of its end; empty
        for the echo server, which has no turns.
    rss_mb: memory of the server process, at equal intervals from beginning to end.
    """

    arm: str
    cpu_s: float
    audio_s: float
    cpu_ms_per_s: float
    n_deltas: int
    delta_bytes: int
    n_responses: int
    late_share: float
    lag_ms: list[float]
    behind_ms: list[float]
    rss_mb: list[float]


async def measure(arm: str, server: ServerProcess, options: Options, seconds: float) -> Cost:
    clock = MonotonicClock()
    compression = "deflate" if options.deflate else None
    message_s = options.frames_per_message * clip.FRAME_S
    users = Users(server.url, _periods(options), message_s, compression, clock)
    running = asyncio.create_task(users.run())
    try:
        await _sleep(WARM_UP_S, running)
        await asyncio.to_thread(
            server.lag_ms
        )  # discard the lag of the beginning, when all connect at once
        users.reset()
        before_s, rss_mb = server.cpu_s(), [server.rss_mb()]
        for i in range(N_RSS):
            n_turns = len(users.traffic.behind_s)
            await _sleep(seconds / N_RSS, running)
            rss_mb.append(server.rss_mb())
            _print_progress(arm, (i + 1) / N_RSS, rss_mb[-1], users.traffic.behind_s[n_turns:])
        cpu_s, traffic = server.cpu_s() - before_s, users.traffic
        lag_ms = await asyncio.to_thread(server.lag_ms)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return _cost(arm, cpu_s, traffic, lag_ms, rss_mb)


def _print_progress(arm: str, share: float, rss_mb: float, behind_s: list[float]) -> None:
    worst = f", ends of turns known {1e3 * max(behind_s):.0f} ms later at most" if behind_s else ""
    print(f"{arm} {share:.0%}: {rss_mb:.0f} MB{worst}", file=sys.stderr, flush=True)


def _cost(
    arm: str, cpu_s: float, traffic: Traffic, lag_ms: list[float], rss_mb: list[float]
) -> Cost:
    return Cost(
        arm=arm,
        cpu_s=round(cpu_s, 3),
        audio_s=round(traffic.audio_s, 2),
        cpu_ms_per_s=round(1e3 * cpu_s / traffic.audio_s, 3),
        n_deltas=traffic.n_deltas,
        delta_bytes=traffic.delta_bytes,
        n_responses=traffic.events["response.done"],
        late_share=round(traffic.late / traffic.sent, 4),
        lag_ms=lag_ms,
        behind_ms=_percentiles_ms(traffic.behind_s),
        rss_mb=[round(mb, 1) for mb in rss_mb],
    )


def _percentiles_ms(times_s: list[float]) -> list[float]:
    """P50, P99 and the maximum; empty if there are no times."""
    if not times_s:
        return []
    return [round(1e3 * float(s), 1) for s in (*np.percentile(times_s, (50, 99)), max(times_s))]


async def _sleep(seconds: float, running: asyncio.Task[None]) -> None:
    """Sleep; raise the users' error if they end before."""
    done, _ = await asyncio.wait({running}, timeout=seconds)
    if done:
        running.result()


def run_pair(options: Options) -> tuple[Cost, Cost]:
    """Measure the gateway, then the echo server, which sends as much audio."""
    with ServerProcess("gateway", options.reply_s) as server:
        gateway = asyncio.run(measure("gateway", server, options, options.seconds))
    if not gateway.n_deltas:
        raise RuntimeError("no response from the gateway: raise --seconds")
    delta_bytes = round(gateway.delta_bytes / gateway.n_deltas / 2) * 2
    out_per_in = gateway.delta_bytes / (gateway.audio_s * 2 * clip.SAMPLE_RATE_HZ)
    with ServerProcess("echo", delta_bytes, out_per_in) as server:
        seconds = options.echo_seconds or options.seconds
        echo = asyncio.run(measure("echo", server, options, seconds))
    return gateway, echo


def ratio(costs: list[Cost]) -> float:
    """CPU time of the gateway over that of the echo server, per second of session."""
    totals = {}
    for arm in ("gateway", "echo"):
        own = [cost for cost in costs if cost.arm == arm]
        totals[arm] = sum(cost.cpu_s for cost in own) / sum(cost.audio_s for cost in own)
    return totals["gateway"] / totals["echo"]


def table(costs: list[Cost]) -> str:
    lines = [
        "arm      CPU s  session s  CPU ms per session s  deltas  delta MB  responses  late  "
        "loop lag P50/P99/max ms   behind P50/P99/max ms  memory MB"
    ]
    for cost in costs:
        lag = "/".join(f"{ms:.1f}" for ms in cost.lag_ms)
        behind = "/".join(f"{ms:.0f}" for ms in cost.behind_ms)
        memory = f"{cost.rss_mb[0]:.0f} to {cost.rss_mb[-1]:.0f}"
        lines.append(
            f"{cost.arm:7}  {cost.cpu_s:5.2f}  {cost.audio_s:9.1f}  {cost.cpu_ms_per_s:20.2f}  "
            f"{cost.n_deltas:6d}  {cost.delta_bytes / 1e6:8.2f}  {cost.n_responses:9d}  "
            f"{cost.late_share:4.1%}  {lag:>23}  {behind:>22}  {memory}"
        )
    lines.append(f"gateway / echo: {ratio(costs):.2f}")
    if any(cost.late_share > LATE_LIMIT for cost in costs):
        lines.append("the machine is too small for users and server together, or is shared")
    return "\n".join(lines)


def _periods(options: Options) -> list[list[str]]:
    clips = sorted(CLIPS.glob("*.flac"))
    periods = [
        period(clip.load_pcm(path), options.reply_s + PAUSE_S, options.frames_per_message)
        for path in clips
    ]
    return [periods[i % len(periods)] for i in range(options.sessions)]


def parse(argv: list[str] | None) -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.gateway_cost", description=__doc__.splitlines()[0]
    )
    for option in fields(Options):
        flag = "--" + option.name.replace("_", "-")
        if option.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default)
        else:
            kind = int if option.type is int else float
            parser.add_argument(flag, type=kind, default=option.default)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = vars(parser.parse_args(argv))
    path = args.pop("json")
    try:
        return Options(**args), path
    except ValueError as error:
        parser.error(str(error))


def document(options: Options, costs: list[Cost]) -> dict[str, Any]:
    return {
        "benchmark": "gateway_cost",
        **facts(),
        "options": asdict(options),
        "arms": [asdict(cost) for cost in costs],
        "ratio": round(ratio(costs), 3),
    }


def main(argv: list[str] | None = None) -> int:
    options, path = parse(argv)
    costs = [cost for _ in range(options.repeats) for cost in run_pair(options)]
    print(table(costs))
    if path is not None:
        path.write_text(json.dumps(document(options, costs), indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
