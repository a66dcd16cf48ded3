"""The queue of events for a client: order, held lanes, discarded audio."""

import asyncio
import json

import pytest

from sglang_live.gateway.call.outbox import Outbox


class Network:
    def __init__(self, limit_bytes: int = 10_000):
        self.sent = []
        self.open = asyncio.Event()
        self.open.set()
        self.outbox = Outbox(self._send, limit_bytes)

    async def _send(self, frame: str) -> None:
        await self.open.wait()
        self.sent.append(json.loads(frame)["n"])

    async def drained(self) -> list:
        task = asyncio.create_task(self.outbox.drain())
        await asyncio.sleep(0.01)
        task.cancel()
        return self.sent

    def emit(self, n, lane=None, audio_s=0.0, **fields):
        self.outbox.emit("event", lane=lane, audio_s=audio_s, n=n, **fields)


async def test_discarding_drops_the_audio_of_one_lane_and_returns_its_duration():
    network = Network()
    network.emit(1, "a", 0.2)
    network.emit(2, "a")
    network.emit(3, "b", 0.2)
    network.emit(4, "a", 0.1)
    assert round(network.outbox.discard_audio("a"), 6) == 0.3
    assert await network.drained() == [2, 3]


async def test_only_frames_that_the_network_has_taken_are_reported_as_sent():
    network = Network()
    taken = []
    network.open.clear()
    sending = asyncio.create_task(network.outbox.drain())
    for n in range(3):
        on_sent = lambda n=n: taken.append(n)  # noqa: E731
        network.outbox.emit("event", on_sent=on_sent, lane="a", audio_s=0.2, n=n)
    await asyncio.sleep(0)
    assert round(network.outbox.discard_audio("a"), 6) == 0.4
    network.open.set()
    await asyncio.sleep(0.01)
    assert (network.sent, taken) == ([0], [0])
    sending.cancel()


async def test_other_events_pass_a_held_lane_which_keeps_its_own_order():
    network = Network()
    network.emit(1, "a", 0.2)
    network.outbox.hold("a")
    network.emit(2)
    network.emit(3, "a")
    assert await network.drained() == [2]
    network.outbox.release("a")
    network.emit(4, "a")
    assert await network.drained() == [2, 1, 3, 4]


async def test_held_audio_can_be_discarded_and_the_rest_is_sent_after_release():
    network = Network()
    network.outbox.hold("a")
    network.outbox.hold("a")
    network.emit(1, "a", 0.2)
    network.emit(2, "a")
    assert network.outbox.discard_audio("a") == 0.2
    network.outbox.release("a")
    network.outbox.release("a")
    assert await network.drained() == [2]


async def test_discarded_audio_frees_its_bytes():
    network = Network(limit_bytes=1000)
    for n in range(20):
        network.emit(n, "a", 0.2, delta="x" * 500)
        network.outbox.discard_audio("a")
    network.emit(20)
    assert await network.drained() == [20]


async def test_held_audio_counts_as_unread():
    network = Network(limit_bytes=1000)
    network.outbox.hold("a")
    for n in range(3):
        network.emit(n, "a", 0.2, delta="x" * 400)
    assert await network.outbox.until_lost() == "slow_reader"


async def test_a_frame_that_is_never_taken_means_a_stalled_client():
    network = Network()
    network.outbox = Outbox(network._send, 10_000, patience_s=0.02)
    network.open.clear()
    network.emit(1)
    sending = asyncio.create_task(network.outbox.drain())
    async with asyncio.timeout(30):
        assert await network.outbox.until_lost() == "stalled"
    sending.cancel()


async def test_a_slow_network_does_not_mean_a_stalled_client():
    network = Network()
    network.outbox = Outbox(network._send, 10_000, patience_s=0.05)
    sending = asyncio.create_task(network.outbox.drain())
    lost = asyncio.create_task(network.outbox.until_lost())
    for n in range(30):
        network.open.clear()
        network.emit(n)
        await asyncio.sleep(0.01)
        network.open.set()
        await asyncio.sleep(0)
    await asyncio.sleep(0.12)  # an empty queue does not mean a stalled client either
    assert network.sent == [*range(30)]
    assert not lost.done()
    network.emit(31, fields="x" * 20_000)
    async with asyncio.timeout(30):
        assert await lost == "slow_reader"
    sending.cancel()


async def test_drain_returns_when_the_network_fails_and_raises_when_on_sent_fails():
    async def broken(frame: str) -> None:
        raise ConnectionResetError

    outbox = Outbox(broken, 10_000)
    outbox.emit("event")
    await outbox.drain()

    network = Network()
    network.outbox.emit("event", on_sent=lambda: 1 / 0, n=1)
    with pytest.raises(ZeroDivisionError):
        await network.outbox.drain()
