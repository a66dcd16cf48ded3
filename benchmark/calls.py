"""Calls over WebRTC beside sessions over a socket: cost, drift, memory, first sound and stop.

    python -m benchmark.calls --calls 10 --seconds 600 --losses 0,0.02,0.1 \\
        --jitter-ms 100 --json out.json
    python -m benchmark.calls --calls 25 --seconds 120 --losses 0 --json out.json

All arms get the same users, one arm after the other: recorded speech at the pace of time, of which
every second utterance interrupts a response. The gateway is the real one with a recording for
responses, and its process of calls. The costs of the stages are not included. Needs the extra
`webrtc`.
"""

import argparse
import asyncio
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmark.call_users import (
    CLEARED,
    STARTED,
    Network,
    Script,
    User,
    appended,
    call,
    encoded,
    talk,
)
from benchmark.gateway_servers.process import ServerProcess
from benchmark.load.provenance import facts
from sglang_live.client import clip

CLIPS = Path(__file__).parent / "workloads" / "clips"
# Not librivox_0870, which the responses are: it would be taken for their echo.
SAID = ("librivox_0880", "librivox_0920", "librivox_0890", "librivox_0880")
WARM_UP_S = 5.0
N_PARTS = 10
# A stop that takes longer is none.
_STOP_S = 3.0
_GAP_S = 0.3
# What is found farther from a begin is the rest of an utterance that was cut in two.
_NEAR_MS = 1500
# With a larger share of late frames the machine was short of CPU for users and server.
_LATE_LIMIT = 0.01
SOCKET, CALLS = "websocket", "webrtc"
_HOST = "sglang_live.webrtc.host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field. losses: shares of packets; the socket has none."""

    calls: int = 10
    seconds: float = 60.0
    losses: str = "0"
    jitter_ms: float = 0.0
    reply_s: float = 6.0

    @property
    def networks(self) -> list[Network]:
        """Jitter comes with losses."""
        losses = [float(text) for text in self.losses.split(",")]
        return [Network(loss, self.jitter_ms / 1e3 if loss else 0.0) for loss in losses]

    def __post_init__(self) -> None:
        if self.calls < 1 or min(self.seconds, self.reply_s) <= 0 or self.jitter_ms < 0:
            raise ValueError("all numbers must be positive")
        if not all(0 <= one.loss < 1 for one in self.networks):
            raise ValueError("a loss is a share of the packets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """
    Attributes:
        gateway_ms_per_s, calls_ms_per_s: CPU time of the gateway and of its process of calls, per
            second of one call.
        gateway_mb, calls_mb: their memory, at equal intervals.
        n_utterances: that were said. n_found: speech that the server found.
        drift_ms: how much later the server places speech in the user's sound in the last third of
            the run than in the first: medians.
        first_sound_ms: P50 and P90 from the end of speech to the first sound of the response.
        stop_ms: the same from the begin of an interruption to the event by which the client is
            silent. sound_stop_ms: to the last sound; over a socket what has come is dropped then.
        late_share: frames that users sent more than 50 ms late.
    """

    transport: str
    loss: float
    jitter_ms: float
    gateway_ms_per_s: float
    calls_ms_per_s: float
    gateway_mb: list[float]
    calls_mb: list[float]
    n_utterances: int
    n_found: int
    drift_ms: float | None
    first_sound_ms: list[float]
    stop_ms: list[float]
    sound_stop_ms: list[float]
    late_share: float


class Processes:
    """The gateway's, and those of its calls."""

    def __init__(self, pid: int):
        self._gateway = psutil.Process(pid)

    def look(self) -> tuple[float, float, float, float]:
        """CPU seconds of both, MB of both."""
        hosts = [one for one in self._gateway.children() if _HOST in one.cmdline()]
        cpu_s = [sum(one.cpu_times()[:2]) for one in (self._gateway, *hosts)]
        mb = [one.memory_info().rss / 1e6 for one in (self._gateway, *hosts)]
        return cpu_s[0], sum(cpu_s[1:]), mb[0], sum(mb[1:])


async def measure(options: Options, network: Network | None) -> Arm:
    """network: None for the socket."""
    script = Script.of([clip.load_pcm(CLIPS / f"{name}.flac") for name in SAID], options.reply_s)
    step = len(script.frames) // options.calls
    users = [User(script, n * step) for n in range(options.calls)]
    with ServerProcess("gateway", options.reply_s) as server:
        url = server.url.replace("ws", "http", 1).removesuffix("/v1/realtime")
        if network is None:
            messages = appended(script)
            sessions = [talk(user, messages, url) for user in users]
        else:
            packets = encoded(script, network.loss)
            rngs = [random.Random(n) for n in range(options.calls)]
            sessions = [
                call(user, packets, url, network, rng)
                for user, rng in zip(users, rngs, strict=True)
            ]
        running = asyncio.gather(*sessions)
        try:
            await _sleep(WARM_UP_S, running)
            processes = Processes(server.pid)
            looks = [processes.look()]
            n_before = sum(user.n_sent for user in users)
            for part in range(N_PARTS):
                await _sleep(options.seconds / N_PARTS, running)
                looks.append(processes.look())
                progress = f"{100 * (part + 1) // N_PARTS} %: {looks[-1][2]:.0f} MB"
                print(_name(network), progress, file=sys.stderr, flush=True)
            sent_s = clip.FRAME_S * (sum(user.n_sent for user in users) - n_before)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return _arm(users, network, looks, sent_s)


def _arm(users: list[User], network: Network | None, looks: list[Any], sent_s: float) -> Arm:
    used_s = np.array(looks[-1][:2]) - looks[0][:2]
    over_socket = network is None
    stop = STARTED if over_socket else CLEARED
    return Arm(
        transport=SOCKET if over_socket else CALLS,
        loss=0.0 if over_socket else network.loss,
        jitter_ms=0.0 if over_socket else 1e3 * network.jitter_s,
        gateway_ms_per_s=round(1e3 * used_s[0] / sent_s, 2),
        calls_ms_per_s=round(1e3 * used_s[1] / sent_s, 2),
        gateway_mb=[round(look[2], 1) for look in looks],
        calls_mb=[round(look[3], 1) for look in looks],
        n_utterances=sum(len(user.said) for user in users),
        n_found=sum(kind == STARTED for user in users for _, kind, _ in user.events),
        drift_ms=drift_ms(users),
        first_sound_ms=_percentiles_ms([s for user in users for s in first_sounds_s(user)]),
        stop_ms=_percentiles_ms([s for user in users for s in stops_s(user, stop)]),
        sound_stop_ms=_percentiles_ms(
            [] if over_socket else [s for user in users for s in sound_stops_s(user)]
        ),
        late_share=round(sum(u.n_late for u in users) / sum(u.n_sent for u in users), 4),
    )


def first_sounds_s(user: User) -> list[float]:
    """From the end of each utterance to the next sound, where one comes before the next one."""
    said = user.said
    nexts = [begin for begin, _, _ in said[1:]]
    found = []
    for (_, end_s, _), next_s in zip(said, nexts, strict=False):
        came_s = next((s for s in user.sounds if s > end_s), None)
        if came_s is not None and came_s < next_s:
            found.append(came_s - end_s)
    return found


def stops_s(user: User, kind: str) -> list[float]:
    """From the begin of each interruption to the first event of this kind."""
    found = []
    for begin_s, _, interrupts in user.said:
        came = [s - begin_s for s, what, _ in user.events if what == kind and s > begin_s]
        if interrupts and came and came[0] < _STOP_S:
            found.append(came[0])
    return found


def sound_stops_s(user: User) -> list[float]:
    """From the begin of each interruption to the last sound before a gap."""
    found, sounds = [], np.array(user.sounds)
    for begin_s, _, interrupts in user.said:
        later = sounds[sounds > begin_s - clip.FRAME_S]
        gaps = np.flatnonzero(np.diff(later) > _GAP_S)
        if interrupts and len(gaps) and later[0] < begin_s + _GAP_S:
            stop_s = float(later[gaps[0]] - begin_s)
            if 0 < stop_s < _STOP_S:
                found.append(stop_s)
    return found


def drift_ms(users: list[User]) -> float | None:
    """None: too little was said."""
    thirds: list[list[float]] = [[], [], []]
    for user in users:
        begins_ms = np.array([1e3 * begin_s for begin_s, _, _ in user.said])
        length_s = clip.FRAME_S * user.n_sent
        for came_s, kind, at_ms in user.events:
            if kind == STARTED and len(begins_ms):
                behind_ms = at_ms - begins_ms
                nearest_ms = float(behind_ms[np.abs(behind_ms).argmin()])
                if abs(nearest_ms) < _NEAR_MS:
                    thirds[min(2, int(3 * came_s / length_s))].append(nearest_ms)
    if not (thirds[0] and thirds[2]):
        return None
    return round(float(np.median(thirds[2]) - np.median(thirds[0])), 1)


def _percentiles_ms(times_s: list[float]) -> list[float]:
    """P50 and P90; empty if there are no times."""
    return [round(1e3 * float(s), 1) for s in np.percentile(times_s, (50, 90))] if times_s else []


async def _sleep(seconds: float, running: asyncio.Future[Any]) -> None:
    """Sleep; raise the users' error if they end before."""
    done, _ = await asyncio.wait({running}, timeout=seconds)
    if done:
        running.result()


def _name(network: Network | None) -> str:
    return SOCKET if network is None else f"{CALLS}, loss {network.loss:.0%}"


def ratio(arms: list[Arm]) -> float:
    """CPU time of the gateway in calls without loss, over that in sessions of sockets."""
    cost = {one.transport: one.gateway_ms_per_s for one in arms if not one.loss}
    return cost[CALLS] / cost[SOCKET]


def table(arms: list[Arm]) -> str:
    lines = [
        "transport  loss  jitter ms  gateway, calls: CPU ms per s  memory MB      found  drift ms  "
        "first sound P50/P90 ms  stop ms    last sound ms  late"
    ]
    for arm in arms:
        memory = ", ".join(f"{mb[0]:.0f} to {mb[-1]:.0f}" for mb in (arm.gateway_mb, arm.calls_mb))
        first, stop, sound = (
            "/".join(f"{ms:.0f}" for ms in figures)
            for figures in (arm.first_sound_ms, arm.stop_ms, arm.sound_stop_ms)
        )
        lines.append(
            f"{arm.transport:9}  {arm.loss:4.0%}  {arm.jitter_ms:9.0f}  "
            f"{arm.gateway_ms_per_s:13.2f}, {arm.calls_ms_per_s:13.2f}  {memory}  "
            f"{arm.n_found}/{arm.n_utterances}  {arm.drift_ms}  {first:>10}  {stop:>10}  "
            f"{sound:>10}  {arm.late_share:.1%}"
        )
    if any(arm.transport == CALLS and not arm.loss for arm in arms):
        lines.append(f"gateway, calls / sockets: {ratio(arms):.2f}")
    if any(arm.late_share > _LATE_LIMIT for arm in arms):
        lines.append("the machine is too small for users and server together, or is shared")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.calls", description=__doc__.splitlines()[0]
    )
    usual = Options()
    parser.add_argument("--calls", type=int, default=usual.calls)
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="of each arm")
    parser.add_argument("--losses", default=usual.losses, help="shares, with an arm each")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="where there are losses")
    parser.add_argument("--reply-s", type=float, default=usual.reply_s)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = vars(parser.parse_args(argv))
    path = args.pop("json")
    try:
        options = Options(**args)
    except ValueError as error:
        parser.error(str(error))
    arms = [asyncio.run(measure(options, one)) for one in (None, *options.networks)]
    print(table(arms))
    if path is not None:
        document = {
            "benchmark": "calls",
            **facts(),
            "options": asdict(options),
            "arms": [asdict(arm) for arm in arms],
        }
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
