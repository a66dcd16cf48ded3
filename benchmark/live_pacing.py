"""Pace of Live sessions, and their cost beside Realtime's.

    python -m benchmark.live_pacing --sessions 100 --seconds 60 --json out.json
    python -m benchmark.live_pacing --sessions 1 --seconds 600 --realtime-seconds 60

Both protocols get the same users in the same run, one after the other: microphones at the pace of
time, whose gateway is the real one with a recording for responses. A Realtime session has semantic
turn detection and transcripts, too. Of the Live API each packet of 100 ms is dated as it comes. The
costs of the stages and of the orchestrator are not included.
"""

import argparse
import asyncio
import base64
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from websockets.asyncio.client import ClientConnection, connect

from benchmark.gateway_servers.process import ServerProcess
from benchmark.gateway_servers.users import period
from benchmark.load.provenance import facts
from sglang_live.client import clip
from sglang_live.clock import MonotonicClock

CLIPS = Path(__file__).parent / "workloads" / "clips"
WARM_UP_S = 3.0
PAUSE_S = 1.5
TICK_S = 0.1
# Sessions begin within this time, so that their packets are not due at the same moment.
START_S = 1.0
# Samples of int16: what is softer, and not zero, is noise that takes the place of silence.
NEAR_ZERO = 8


@dataclass(slots=True)
class Heard:
    """Packets of one Live session, since the warm-up.

    at_s: time of each. n_zero: those of exact zeros. n_near_zero: those that only seem silent.
    """

    at_s: list[float] = field(default_factory=list)
    n_zero: int = 0
    n_near_zero: int = 0

    def take(self, packet: bytes, at_s: float) -> None:
        self.at_s.append(at_s)
        loudest = int(np.abs(np.frombuffer(packet, "<i2").astype(np.int32)).max())
        self.n_zero += loudest == 0
        self.n_near_zero += 0 < loudest <= NEAR_ZERO

    @property
    def early_s(self) -> np.ndarray:
        """How long each packet comes before the time at which the one of the median pace would."""
        behind = np.array(self.at_s) - TICK_S * np.arange(len(self.at_s))
        return np.median(behind) - behind

    @property
    def gaps_s(self) -> np.ndarray:
        return np.diff(self.at_s)


@dataclass(frozen=True, slots=True)
class Cost:
    """One protocol. cpu_ms_per_s: of the server's process, per second of one session."""

    arm: str
    sessions: int
    seconds: float
    cpu_ms_per_s: float
    lag_ms: list[float]


@dataclass(frozen=True, slots=True)
class Pace:
    """Of all Live sessions together.

    lead_ms: of the packet that was earliest.
    gap_ms: P50, P99 and the longest time between two packets.
    jitter_ms: P50, P99 and the most that a packet came before or after its time.
    """

    n_packets: int
    n_zero: int
    n_near_zero: int
    lead_ms: float
    gap_ms: list[float]
    jitter_ms: list[float]


@dataclass(frozen=True, slots=True)
class Protocol:
    """path: of its socket. first: the first event. append, delta: types of events with audio."""

    path: str
    first: dict[str, Any]
    append: str
    delta: str


LIVE = Protocol(
    "/v1/live/sessions",
    {"type": "session.start", "session": {"model": "recording"}},
    "session.input_audio.append",
    "session.output_audio.delta",
)
# What a Live session has without being asked for it.
INPUT = {"turn_detection": {"type": "semantic_vad"}, "transcription": {"model": "recording"}}
REALTIME = Protocol(
    "/v1/realtime",
    {"type": "session.update", "session": {"type": "realtime", "audio": {"input": INPUT}}},
    "input_audio_buffer.append",
    "response.output_audio.delta",
)


class Users:
    """All sessions of an arm. heard: since the last reset."""

    def __init__(self, url: str, protocol: Protocol, periods: list[list[str]]):
        self._url = url.replace(REALTIME.path, protocol.path)
        self._protocol = protocol
        kinds = REALTIME.append, protocol.append
        self._periods = [[one.replace(*kinds) for one in messages] for messages in periods]
        self._clock = MonotonicClock()
        self.reset()

    def reset(self) -> None:
        self.heard = [Heard() for _ in self._periods]

    async def run(self) -> None:
        """Run until cancelled. Raises an error if the server closes a session."""
        async with asyncio.TaskGroup() as tasks:
            for n in range(len(self._periods)):
                tasks.create_task(self._session(n))

    async def _session(self, n: int) -> None:
        await self._clock.sleep(START_S * n / len(self._periods))
        async with (
            connect(self._url, compression=None, max_size=None, proxy=None) as socket,
            asyncio.TaskGroup() as tasks,
        ):
            await socket.send(json.dumps(self._protocol.first))
            tasks.create_task(self._listen(socket, n))
            tasks.create_task(self._speak(socket, n))

    async def _speak(self, socket: ClientConnection, n: int) -> None:
        messages = self._periods[n]
        at, due_s = n * len(messages) // len(self._periods), self._clock.now_s()
        while True:
            await socket.send(messages[at % len(messages)])
            at += 1
            due_s += clip.FRAME_S
            await self._clock.sleep(due_s - self._clock.now_s())

    async def _listen(self, socket: ClientConnection, n: int) -> None:
        async for text in socket:
            at_s, event = self._clock.now_s(), orjson.loads(text)
            if event["type"] == self._protocol.delta:
                self.heard[n].take(base64.b64decode(event["delta"]), at_s)
            elif event["type"] == "error":
                raise RuntimeError(event["error"]["message"])
        raise ConnectionError("the server closed a session")


async def measure(
    arm: str, server: ServerProcess, users: Users, sessions: int, seconds: float
) -> Cost:
    running = asyncio.create_task(users.run())
    try:
        await _sleep(WARM_UP_S, running)
        await asyncio.to_thread(server.lag_ms)  # that of the beginning is discarded
        users.reset()
        before_s = server.cpu_s()
        await _sleep(seconds, running)
        cpu_s = server.cpu_s() - before_s
        lag_ms = await asyncio.to_thread(server.lag_ms)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return Cost(arm, sessions, seconds, round(1e3 * cpu_s / seconds / sessions, 3), lag_ms)


async def _sleep(seconds: float, running: asyncio.Task[None]) -> None:
    """Sleep; raise the users' error if they end before."""
    done, _ = await asyncio.wait({running}, timeout=seconds)
    if done:
        running.result()


def pace(heard: list[Heard]) -> Pace:
    early_s = np.concatenate([each.early_s for each in heard])
    gaps_s = np.concatenate([each.gaps_s for each in heard])
    return Pace(
        n_packets=len(early_s),
        n_zero=sum(each.n_zero for each in heard),
        n_near_zero=sum(each.n_near_zero for each in heard),
        lead_ms=round(1e3 * float(early_s.max()), 1),
        gap_ms=_percentiles_ms(gaps_s),
        jitter_ms=_percentiles_ms(np.abs(early_s)),
    )


def _percentiles_ms(times_s: np.ndarray) -> list[float]:
    return [round(1e3 * float(s), 1) for s in (*np.percentile(times_s, (50, 99)), times_s.max())]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.live_pacing", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--realtime-seconds", type=float, help="default: as --seconds")
    parser.add_argument("--reply-s", type=float, default=3.0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    clips = [clip.load_pcm(path) for path in sorted(CLIPS.glob("*.flac"))]
    periods = [period(pcm, args.reply_s + PAUSE_S) for pcm in clips]
    said = [periods[n % len(periods)] for n in range(args.sessions)]
    with ServerProcess("gateway", args.reply_s) as server:
        live = Users(server.url, LIVE, said)
        costs = [asyncio.run(measure("live", server, live, args.sessions, args.seconds))]
        found = pace(live.heard)
        seconds = args.realtime_seconds or args.seconds
        other = Users(server.url, REALTIME, said)
        costs.append(asyncio.run(measure("realtime", server, other, args.sessions, seconds)))
    print(report(costs, found))
    if args.json is not None:
        document = {"benchmark": "live_pacing", **facts(), **figures(costs, found)}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


def figures(costs: list[Cost], found: Pace) -> dict[str, Any]:
    live, realtime = costs
    return {
        "arms": [asdict(cost) for cost in costs],
        "ratio": round(live.cpu_ms_per_s / realtime.cpu_ms_per_s, 3),
        "pace": asdict(found),
    }


def report(costs: list[Cost], found: Pace) -> str:
    lines = [
        f"{cost.arm:9}{cost.sessions:5} sessions{cost.seconds:7.0f} s"
        f"{cost.cpu_ms_per_s:8.2f} ms of CPU per session s, loop lag {cost.lag_ms} ms"
        for cost in costs
    ]
    lines.append(f"live / realtime: {figures(costs, found)['ratio']:.2f}")
    lines.append(
        f"{found.n_packets} packets, {found.n_zero} of exact zeros, {found.n_near_zero} nearly; "
        f"lead {found.lead_ms} ms; gaps P50, P99, most {found.gap_ms} ms; "
        f"jitter {found.jitter_ms} ms"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
