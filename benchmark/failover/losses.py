"""What a user hears when a process of a fleet is lost in a response, and when a host drains."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from benchmark.failover.fleet import Fleet, Host
from benchmark.failover.listener import (
    Listener,
    ResponseError,
    longest_silence_s,
    longest_wait_s,
)
from benchmark.load.server import ServerProcess

# Arms whose process is killed as soon as this many pieces of text have come. Others wait until the
# listener has some audio ahead.
_IN_TEXT = 3
_SETTLE_S = 1.0
_LOST = re.compile(r'^sglang_live_lost_jobs_total\{outcome="(\w+)",stage="\w+"\} (\S+)', re.M)
# As ClusterManager: gateways have read by then that a host drains, and it has told of its jobs.
_READ_BY_S = 6.0
_POLL_S = 0.25
# Of a turn while hosts drain, so that some end in each drain.
_SHORT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One response.

    busy: share of all cores that was busy in the second before it.
    moved: jobs that went on in another replica.
    text_ms, audio_ms: longest wait for new text and audio, from the loss until WATCHED_S of audio
        have come. None: none came.
    silent_ms: for how long at once the listener heard nothing by then.
    resumed_ms: from the loss until the session went on at another gateway. None: it did not.
    """

    arm: str
    busy: float
    moved: int
    text_ms: float | None
    audio_ms: float | None
    silent_ms: float
    resumed_ms: float | None = None


async def settled(fleet: Fleet) -> float:
    """Returns the share of all cores that is busy while nothing happens."""
    await asyncio.to_thread(fleet.wait_until_whole)
    return (await asyncio.to_thread(psutil.cpu_percent, _SETTLE_S)) / 100


async def lose(fleet: Fleet, entry: str, arm: str, buffered_s: float) -> Row:
    """A response in which a process is lost; it is there again afterwards.

    Args:
        arm: see ARMS in __main__.py.
        buffered_s: audio that the listener has not heard when it is lost.
    Raises:
        ResponseError: the response does not go on, or nothing was lost.
    """
    busy = await settled(fleet)
    before = _lost_jobs(fleet)
    async with _loss(fleet, arm) as begin:
        async with Listener(entry, resumable=arm == "gateway") as user:
            await user.ask()
            if arm in ("thinker", "undisturbed_in_text"):
                await user.hear_until(lambda: len(user.text) >= _IN_TEXT)
            else:
                await user.hear_until(lambda: user.playback.buffered_s >= buffered_s)
            lost_s = await user.hear_after(begin)
        lost = _lost_jobs(fleet) - before
    if lost.keys() - {"moved"}:
        raise ResponseError(f"{arm}: jobs were lost: {dict(lost)}")
    until_s = user.audio[-1].at_s
    return Row(
        arm=arm,
        busy=round(busy, 3),
        moved=lost["moved"],
        text_ms=_ms(longest_wait_s(user.text, lost_s, until_s)),
        audio_ms=_ms(longest_wait_s(user.audio, lost_s, until_s)),
        silent_ms=_ms(longest_silence_s(user.audio, until_s)) or 0.0,
        resumed_ms=_ms(user.resumed_s and user.resumed_s - lost_s),
    )


@asynccontextmanager
async def _loss(fleet: Fleet, arm: str) -> AsyncIterator[Callable[[], object]]:
    """Yields what loses the arm's process. A session is with the first of equal hosts."""
    host = fleet.hosts[0]
    match arm:
        case "undisturbed" | "undisturbed_in_text":
            yield lambda: None
        case "silent":
            try:
                yield host.stop
            finally:
                host.go_on()
        case "gateway":
            killed: list[ServerProcess] = []
            yield lambda: killed.append(fleet.kill_gateway())
            for gateway in killed:
                await asyncio.to_thread(gateway.stop)
                await asyncio.to_thread(fleet.add_gateway)
        case _:
            process = host.process_of(arm)
            yield process.kill
            await asyncio.to_thread(process.wait, 10)
            # Not before the gateway has seen it.
            await asyncio.to_thread(fleet.wait_until_whole)


def _lost_jobs(fleet: Fleet) -> Counter[str]:
    """By outcome, at all gateways."""
    lost = Counter[str]()
    for gateway in fleet.gateways:
        for outcome, n in _LOST.findall(gateway.metrics()):
            lost[outcome] += int(float(n))
    return lost


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(1000 * time_s, 1)


@dataclass(frozen=True, slots=True)
class Drains:
    """
    drained_ms: of each, from the order until the host has no job, and may end.
    turns: number by status, of all users and the whole time.
    """

    drained_ms: list[float]
    turns: dict[str, int]


async def drain(fleet: Fleet, n_drains: int, n_users: int) -> Drains:
    """Take one host away after the other, while users have turn after turn."""
    await settled(fleet)
    turns, is_over, drained_ms = Counter[str](), asyncio.Event(), []

    async def talk() -> None:
        async with Listener(fleet.gateways[0].url) as user:
            while not is_over.is_set():
                await user.ask(_SHORT_TOKENS)
                turns[(await user.hear_all())["status"]] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(n_users):
            group.create_task(talk())
        for number in range(n_drains):
            host = fleet.hosts[number % len(fleet.hosts)]
            began_s = time.monotonic()
            fleet.announce(draining=[host])
            await asyncio.sleep(_READ_BY_S)
            while await asyncio.to_thread(_n_jobs, fleet, host):
                await asyncio.sleep(_POLL_S)
            drained_ms.append(round(1000 * (time.monotonic() - began_s)))
            fleet.announce(without=[host])
            await asyncio.to_thread(fleet.wait_until_gone, host)
            fleet.announce()
            await asyncio.to_thread(fleet.wait_until_whole)
        is_over.set()
    return Drains(drained_ms, dict(turns))


def _n_jobs(fleet: Fleet, host: Host) -> int:
    """In a host's stages, as they said last."""
    line = rf'^sglang_live_stage_load\{{replica="{host.number}",stage="\w+",what="jobs"\}} (\S+)'
    found = re.findall(line, fleet.gateways[0].metrics(), re.M)
    if not found:
        raise RuntimeError(f"host {host.number} says nothing of its jobs")
    return sum(int(float(n)) for n in found)


async def first_audio_ms(url: str, *, resumable: bool) -> float:
    """From a typed question to the first audio."""
    async with Listener(url, resumable=resumable) as user:
        asked_s = await user.ask(_SHORT_TOKENS)
        await user.hear_until(lambda: bool(user.audio))
        return round(1000 * (user.audio[0].at_s - asked_s), 2)
