"""A pool that changes its size counts every page once, whatever is in use."""

import os
import random
import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from sglang_live.extensions.elastic.engine.buffers import (
    BufferPlan,
    create_elastic_buffers,
)
from sglang_live.extensions.elastic.engine.pool import ElasticPool
from test.unit.extensions.elastic.engine.fake_vmm import FakeVmm

N_HEADS, HEAD_DIM, N_LAYERS = 2, 16, 2


class FakeKvPool(SimpleNamespace):
    """What the buffers need to know of SGLang's pool."""

    def _kv_buffer_shapes(self):
        shape = (self.size + self.page_size, N_HEADS, HEAD_DIM)
        return shape, shape


class Engine:
    """A pool with a real allocator, and the pages that its requests use.

    Args:
        units: of memory at first; None: as many as the tokens have.
        greet: tells the memory at first, instead.
        device: of the memory; the allocator is on the CPU.
    """

    def __init__(
        self, page: int, tokens: int, units: int | None = None, greet=None, device: str = "cpu"
    ):
        self.kv = FakeKvPool(
            size=tokens,
            page_size=page,
            layer_num=N_LAYERS,
            store_dtype=torch.float32,
            kv_cache_layout="nhd",
            device=device,
        )

        def granules(_store, geometry, n_tokens: int) -> int:
            assert n_tokens == tokens
            return (geometry.units(n_tokens) if units is None else units) * geometry.granules

        create_elastic_buffers(BufferPlan(16, greet or granules), self.kv)
        args = (torch.float32, "cpu", self.kv, False)
        self.allocator = (
            TokenToKVPoolAllocator(tokens, *args)
            if page == 1
            else PagedTokenToKVPoolAllocator(tokens, page, *args)
        )
        self.pool, self.page, self.used = ElasticPool(self.allocator), page, []

    @property
    def n_used(self) -> int:
        return sum(map(len, self.used))

    def alloc(self, n_pages: int) -> bool:
        slots = self.allocator.alloc(n_pages * self.page)
        if slots is None:
            return False
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer[slots] = 1.0  # a fault if it is not backed
        self.used.append(slots)
        return True

    def free(self, rng: random.Random) -> None:
        if self.used:
            slots = self.used.pop(rng.randrange(len(self.used)))
            self.allocator.free(slots)

    def check(self) -> None:
        in_use = torch.cat([torch.zeros(0, dtype=torch.int64), *self.used])
        pages = in_use // self.page
        free = self.allocator.get_all_free_pages()
        both = torch.cat((torch.unique(pages), free))
        assert len(torch.unique(both)) == len(both), "a page is counted twice"
        n_free = self.allocator.available_size()
        assert n_free + self.n_used == self.pool.capacity_tokens
        assert int(both.min()) > 0 and int(both.max()) <= self.allocator.size // self.page

    def give(self, granules: int, rng: random.Random) -> tuple[list, list[int]]:
        """Drain while requests come and go, then release. The files are open."""
        self.pool.begin_drain(granules)
        for _ in range(rng.randrange(4)):
            self.check()
            if rng.random() < 0.5:
                self.free(rng)
            else:
                self.alloc(rng.randrange(1, 9))
            self.pool.drain()
            if rng.random() < 0.1:
                self.used.clear()
                self.allocator.clear()  # flush_cache
        passed = self.pool.release(granules).result()
        files = [os.dup(file) for file in passed.files]
        self.pool.released()
        self.check()
        return passed.runs, files

    def take(self, runs: list, files: list[int]) -> None:
        self.pool.receive(runs, files)
        while not self.pool.mapped():
            time.sleep(0)
        self.check()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("page", [1, 16])
def test_pools_stay_exact_through_any_moves(page, device, monkeypatch):
    sizes = (2000, 3000)
    if device != "cpu":
        FakeVmm().install(monkeypatch)
        sizes = (9000, 14_000)  # of larger granules
    rng = random.Random(page)
    engines = [Engine(page, tokens, device=device) for tokens in sizes]
    total = sum(engine.pool.granules for engine in engines)
    n_moved = 0
    for _ in range(50):
        giver, receiver = rng.sample(engines, 2)
        for engine in engines:
            for _ in range(rng.randrange(6)):
                if rng.random() < 0.6:
                    engine.alloc(rng.randrange(1, 20))
                else:
                    engine.free(rng)
            engine.check()
        runs, files = giver.give(rng.randrange(1, giver.pool.granules), rng)
        if runs:
            receiver.take(runs, files)
            n_moved += 1
        assert sum(engine.pool.granules for engine in engines) == total
    assert n_moved > 20


@pytest.mark.parametrize("page", [1, 16])
def test_a_drain_that_is_used_at_its_end_releases_nothing(page):
    engine = Engine(page, 2000)
    while engine.alloc(1):
        pass
    engine.pool.begin_drain(engine.pool.granules // 2)
    assert engine.pool.drain() > 0
    assert engine.pool.release(engine.pool.granules // 2).result().runs == []
    engine.pool.released()
    engine.check()
    assert engine.allocator.available_size() == 0


def test_a_drain_that_is_used_at_its_begin_releases_the_rest():
    engine = Engine(1, 2047)
    held = engine.alloc(1025)
    assert held
    n_unit = engine.pool.memory.geometry.unit_rows
    engine.pool.begin_drain(48 * engine.pool.memory.geometry.granules)
    runs = engine.pool.release(48 * engine.pool.memory.geometry.granules).result().runs
    engine.pool.released()
    assert sum(run.n for run in runs) < 48 * engine.pool.memory.geometry.granules
    assert engine.pool.capacity_tokens == -(-1026 // n_unit) * n_unit - 1
    engine.check()


def test_a_flush_during_a_drain_keeps_the_tail_out():
    engine = Engine(1, 2047)
    engine.pool.begin_drain(engine.pool.granules // 2)
    capacity = engine.pool.capacity_tokens
    engine.allocator.clear()
    assert engine.pool.capacity_tokens == engine.allocator.available_size() == capacity
    engine.check()


def test_a_pool_begins_with_the_memory_that_it_is_told():
    small, large = Engine(1, 2047, units=9), Engine(1, 2047, units=100)
    assert small.pool.capacity_tokens == small.allocator.available_size() == 9 * 32 - 1
    assert large.pool.capacity_tokens == large.allocator.size == 100 * 32 - 1
    large.check()


def test_memory_that_cannot_be_mapped_changes_nothing():
    engine, other = Engine(1, 2047), Engine(1, 2047)
    runs, files = other.give(80, random.Random(1))
    before = engine.pool.capacity_tokens
    engine.pool.receive(runs, [])
    with pytest.raises(ValueError, match="missing"):
        while not engine.pool.mapped():
            time.sleep(0)
    assert engine.pool.capacity_tokens == before
    engine.check()
    other.take(runs, files)


def test_other_pools_are_refused():
    with pytest.raises(ValueError, match="layout nhd"):
        create_elastic_buffers(
            BufferPlan(2, lambda *_: 1), FakeKvPool(kv_cache_layout="hnd", size=1, page_size=1)
        )
    with pytest.raises(ValueError, match="does not fit SimpleNamespace"):
        ElasticPool(SimpleNamespace())
