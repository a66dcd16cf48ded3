"""Two engines' pools and the mover together: real sockets, files, mappings and allocators."""

import asyncio
import json
import random
import socket
import threading
import time

import pytest
import torch

from sglang_live.extensions.elastic.engine.orders import ElasticOrders
from sglang_live.extensions.elastic.granules import count
from sglang_live.extensions.elastic.messages import (
    ELASTIC_ENV,
    Give,
    Given,
    Hello,
    Need,
    Obtainable,
    Packet,
    ToMover,
    Welcome,
    receive,
    send,
)
from sglang_live.extensions.elastic.mover import KvMover
from sglang_live.extensions.elastic.policy import ElasticConfig
from test.unit.extensions.elastic.engine.fake_vmm import FakeVmm
from test.unit.extensions.elastic.engine.test_pool import Engine

START = {"thinker": 6000, "talker": 24_000}  # floors are 5,120 tokens


class Loop:
    """An engine's rounds in a thread of their own, with requests that come and go."""

    def __init__(self, path, stage: str, page: int, seed: int, device: str, monkeypatch):
        monkeypatch.setenv(ELASTIC_ENV, json.dumps([str(path), stage]))
        found = ElasticOrders.from_env()
        assert found is not None
        self.orders, self.stage, self.page, self.device = found, stage, page, device
        self._rng = random.Random(seed)
        self.idle: list[torch.Tensor] = []  # what can be evicted
        self.needs, self.stop = 0, False

    def begin(self) -> None:
        start, greet = START[self.stage], self.orders.greet
        self.engine = Engine(self.page, start, greet=greet, device=self.device)
        self.orders.pool = self.engine.pool

    def evict(self, n_tokens: int, with_sessions: bool) -> int:
        freed = 0
        if not with_sessions:
            return 0
        while self.idle and freed < n_tokens:
            slots = self.idle.pop()
            self.engine.allocator.free(slots)
            freed += len(slots)
        self.engine.used = [*self.idle]
        return freed

    def round(self) -> None:
        self.orders.step(time.monotonic(), self.evict)
        if self._rng.random() < 0.6:
            slots = self.engine.allocator.alloc(self._rng.randrange(1, 40) * self.page)
            if slots is not None:
                for buffer in (*self.engine.kv.k_buffer, *self.engine.kv.v_buffer):
                    assert not buffer[slots].isnan().any()
                    buffer[slots] = 1.0
                self.idle.append(slots)
        elif self.idle:
            self.engine.allocator.free(self.idle.pop(self._rng.randrange(len(self.idle))))
        self.engine.used = [*self.idle]
        self.engine.check()
        self.orders.report_need(self.needs, self.needs, self.engine.n_used)

    def run(self) -> None:
        until_s = time.monotonic() + 90  # a failed test must not leave the thread
        while not self.stop and time.monotonic() < until_s:
            self.round()
            time.sleep(0.0005)


@pytest.mark.asyncio
@pytest.mark.parametrize(("page", "device"), [(1, "cpu"), (16, "cpu"), (1, "cuda:0")])
async def test_pools_stay_exact_while_the_mover_moves_their_memory(
    tmp_path, monkeypatch, page, device
):
    if device != "cpu":
        FakeVmm().install(monkeypatch)
    mover = KvMover(ElasticConfig(elastic_window_s=0.05))
    path = tmp_path / "mover"
    mover.start(path)
    loops = [Loop(path, stage, page, seed, device, monkeypatch) for seed, stage in enumerate(START)]
    for loop in loops:
        await asyncio.to_thread(loop.begin)
    total = sum(loop.engine.pool.granules for loop in loops)
    running = [asyncio.create_task(asyncio.to_thread(loop.run)) for loop in loops]
    thinker, talker = loops
    async with asyncio.timeout(80):
        for needs, n_moves in ((14_000, 1), (6_000, 1), (18_000, 2)):
            thinker.needs = needs
            while mover.counts["moves_urgent"] < n_moves:
                await asyncio.sleep(0.01)
        thinker.needs, talker.needs = 100, 23_000
        while mover.counts["moves_urgent"] < 3:
            await asyncio.sleep(0.01)
        for _ in range(20):
            await mover.move("thinker", random.Random(page).randrange(1, 400), urgent=True)
            await mover.move("talker", random.Random(page).randrange(1, 400), urgent=False)
    for loop in loops:
        loop.stop = True
    await asyncio.gather(*running)
    async with mover._moving:
        assert sum(loop.engine.pool.granules for loop in loops) == total
    for loop in loops:
        loop.engine.check()
        report = loop.orders.report()
        assert report["elastic_tokens"] == loop.engine.pool.capacity_tokens
        assert report["elastic_received"] and report["elastic_released"]
        assert 0 < report["elastic_longest_resize_s"] <= report["elastic_resize_s"]
    assert (mover.counts["granules_lost"], mover.counts["moves_failed"]) == (0, 0)
    await mover.stop()
    with pytest.raises(EOFError):
        thinker.orders.step(time.monotonic(), thinker.evict)


def test_while_the_mover_does_not_read_an_engine_goes_on_and_answers_later(tmp_path):
    """As when the server is stopped by a signal, and continues."""
    theirs, orders = greeted()
    for needed in range(2000):
        orders.report_need(64 * needed, 64 * needed, 0)
    assert orders.totals["elastic_unsent"] > 0
    unit = orders.pool.memory.geometry.granules
    before = orders.pool.granules
    theirs.setblocking(False)
    send(theirs, Give(unit, urgent=False))
    until_s = time.monotonic() + 20
    unsent = orders.totals["elastic_unsent"]
    while orders.totals["elastic_unsent"] < unsent + 3 and time.monotonic() < until_s:
        orders.step(time.monotonic(), lambda n_tokens, with_sessions: 0)
    told = [packet.message for packet in all_received(theirs)]
    assert not any(isinstance(message, Given) for message in told)
    orders.step(time.monotonic(), lambda n_tokens, with_sessions: 0)
    (packet,) = all_received(theirs)
    assert isinstance(packet.message, Given)
    assert (count(packet.message.runs), packet.message.size) == (unit, before - unit)
    orders.report_need(64, 64, 0)
    (packet,) = all_received(theirs)
    assert isinstance(packet.message, Need)
    theirs.close()


def test_a_step_tells_of_memory_that_became_obtainable():
    """A request of the same round may be as long as the new size allows."""
    theirs, orders = greeted()
    sizes = []
    for promised in (64, 64, 0):
        send(theirs, Obtainable(promised))
        sizes.append(orders.step(time.monotonic(), lambda n_tokens, with_sessions: 0))
    assert sizes == [True, False, True]
    theirs.close()


def greeted() -> tuple[socket.socket, ElasticOrders]:
    """The mover's end of the link, and the orders of an engine that has its pool."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders = ElasticOrders("thinker", ours)
    greeting = threading.Thread(target=lambda: welcome(theirs))
    greeting.start()
    orders.pool = Engine(1, START["thinker"], greet=orders.greet).pool
    greeting.join()
    return theirs, orders


def welcome(link: socket.socket) -> None:
    packet = receive(link, ToMover, wait=True)
    assert packet is not None and isinstance(packet.message, Hello)
    send(link, Welcome(packet.message.start))


def all_received(link: socket.socket) -> list[Packet]:
    packets = []
    while (packet := receive(link, ToMover)) is not None:
        packet.close()
        packets.append(packet)
    return packets


def test_an_engine_without_a_mover_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setenv(ELASTIC_ENV, json.dumps([str(tmp_path / "absent"), "thinker"]))
    with pytest.raises(OSError, match="No such file"):
        ElasticOrders.from_env()
