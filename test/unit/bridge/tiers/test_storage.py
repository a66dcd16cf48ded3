"""Stored tails of a session, for any completion of file operations and any changes meanwhile."""

import os
from concurrent.futures import wait

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.bridge.tiers.storage import WAIT_S, StoredTails
from sglang_live.kv.page_file import PageFile
from sglang_live.kv.retention import Compaction
from test.unit.bridge.fake_host import FakeCache

from .host_talk import Talk, acknowledge

BYTES_PER_VALUE = 8
N_PLACES = 12


class StoredTalk(Talk):
    """Its host copy may have a tail in storage."""

    def __init__(self, cache, copies, stored: StoredTails, name: str, index: int = 0):
        self.stored = stored
        super().__init__(cache, copies, name, index)

    def write(self) -> bool:
        is_written = super().write()
        self.stored.forget_unless_contiguous(self.name)
        return is_written

    def truncate(self, n_kept: int) -> None:
        super().truncate(n_kept)
        self.stored.truncated(self.name, n_kept)
        self.stored.forget_unless_contiguous(self.name)

    def compact(self, compaction: Compaction) -> None:
        super().compact(compaction)
        self.stored.compact(self.name, compaction)
        self.stored.forget_unless_contiguous(self.name)

    def close(self) -> None:
        super().close()
        self.stored.forget_unless_contiguous(self.name)

    def in_storage(self) -> list[int]:
        tail = self.stored._tails[self.name]
        values = np.zeros((len(tail.places), self.page), np.int64)
        for place, page in zip(tail.places, values, strict=True):
            assert self.stored._file.read(place, page.view(np.uint8))
        return values.flatten()[: tail.end - tail.begin].tolist()


def settle(stored: StoredTails) -> list[str]:
    """All that is under way has ended."""
    for queue in (stored._stores, stored._fetches):
        wait(operation.done for operation in queue.operations)
    return stored.settle()


# --- whatever happens, in whatever order ---


class World:
    """Two sessions. Each step has a number from 0 to 1 for what it leaves open."""

    STEPS = (
        *("turn_and_write", "turn_and_write", "evict", "bring_back", "store", "store"),
        *("fetch", "fetch", "settle", "settle", "truncate", "compact", "close", "acknowledge"),
    )

    def __init__(self, page: int):
        self.cache = FakeCache(page, 64)
        self.copies = HostCopies(self.cache)
        self.file = PageFile(".", page * BYTES_PER_VALUE, N_PLACES * page * BYTES_PER_VALUE)
        self.stored = StoredTails(self.copies, self.file, lambda numbers: numbers)
        self.talks = [
            StoredTalk(self.cache, self.copies, self.stored, name, i) for i, name in enumerate("ab")
        ]
        self._n_values = 0

    def turn_and_write(self, talk: StoredTalk, share: float) -> None:
        n_tokens = min(1 + int(9 * share), 60 - len(talk.values))
        talk.turn(n_tokens, self._n_values)
        self._n_values += n_tokens
        talk.write()

    def evict(self, talk: StoredTalk, share: float) -> None:
        n_pages = int(share * talk.up(talk.kv.kv_allocated_len) / talk.page)
        if talk.kv.kv_allocated_len:
            talk.evict(n_pages * talk.page)

    def bring_back(self, talk: StoredTalk, share: float) -> None:
        if talk.n_on_host_alone:
            talk.preload() if share < 0.5 else talk.load(talk.n_on_host_alone)

    def store(self, talk: StoredTalk, share: float) -> None:
        copy = self.copies.of(talk.name)
        if copy is not None and len(copy.slots):
            n_pages = len(copy.slots) // talk.page
            self.stored.store(talk.name, 1 + int(share * n_pages))

    def fetch(self, talk: StoredTalk, share: float) -> None:
        self.stored.fetch(talk.name, now_s=0.0)

    def settle(self, talk: StoredTalk, share: float) -> None:
        self.stored.settle() if share < 0.3 else settle(self.stored)

    def truncate(self, talk: StoredTalk, share: float) -> None:
        talk.truncate(int((1 - share**2) * len(talk.values)))

    def compact(self, talk: StoredTalk, share: float) -> None:
        n_pages = len(talk.values) // talk.page
        begin = int(share * n_pages)
        behind = begin + 1 + int(7 * share) % 3
        if talk.kv.kv_committed_len == len(talk.values) and behind <= n_pages:
            talk.compact(Compaction(begin * talk.page, behind * talk.page))

    def close(self, talk: StoredTalk, share: float) -> None:
        if share < 0.2:
            talk.close()

    def acknowledge(self, talk: StoredTalk, share: float) -> None:
        acknowledge(self.cache, self.copies, most=1 + int(3 * share))

    def check(self) -> None:
        used = set()
        for talk in self.talks:
            copy, tail = self.copies.of(talk.name), self.stored._tails.get(talk.name)
            if copy is not None and not copy.busy:
                assert talk.on_host() == talk.values[copy.begin : copy.end]
            if tail is not None:
                assert tail.begin == copy.end < tail.end
                assert tail.begin % talk.page == 0
                assert len(tail.places) * talk.page == talk.up(tail.end - tail.begin)
                assert talk.in_storage() == talk.values[tail.begin : tail.end]
                assert not used & set(tail.places)
                used |= set(tail.places)
        under_way = {
            place
            for queue in (self.stored._stores, self.stored._fetches)
            for operation in queue.operations
            for place in operation.places
        }
        assert N_PLACES - self.file.n_free == len(used | under_way)


STEP = st.tuples(st.sampled_from(World.STEPS), st.integers(0, 1), st.floats(0, 1, exclude_max=True))


@settings(max_examples=80)
@given(st.sampled_from((1, 4)), st.lists(STEP, min_size=40))
def test_storage_has_exactly_the_tokens_it_reports(page, steps):
    world = World(page)
    for step, talk, share in steps:
        getattr(world, step)(world.talks[talk], share)
        world.check()
    for talk in world.talks:
        talk.close()
    acknowledge(world.cache, world.copies)
    settle(world.stored)
    assert world.stored.tokens == 0
    assert world.file.n_free == N_PLACES
    for pool in (world.cache.host_pool_group, world.cache.device_pool):
        assert pool.available_size() == pool.n_slots
    world.file.close()


# --- one thing at a time ---


@pytest.fixture
def cache():
    return FakeCache(page=4, host_tokens=48)


@pytest.fixture
def file(tmp_path):
    file = PageFile(tmp_path, 4 * BYTES_PER_VALUE, 4 * 4 * BYTES_PER_VALUE)
    yield file
    file.close()


@pytest.fixture
def stored(cache, file):
    return StoredTails(HostCopies(cache), file, lambda numbers: numbers)


@pytest.fixture
def talk(cache, stored):
    """10 tokens, on the host alone."""
    talk = StoredTalk(cache, stored._copies, stored, "a")
    talk.turn(10)
    talk.evict(0)
    acknowledge(cache, stored._copies)
    return talk


def test_a_tail_leaves_the_host_when_it_is_in_the_file_and_not_before(cache, stored, talk):
    assert stored.store("a", 2)
    assert cache.host_pool_group.available_size() == 36
    assert settle(stored) == ["a"]
    assert cache.host_pool_group.available_size() == 44
    assert (talk.on_host(), talk.in_storage()) == ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10])
    assert stored.end_of("a", 0) == 10


def test_tails_grow_towards_the_beginning(stored, talk):
    stored.store("a", 1)
    settle(stored)
    stored.store("a", 2)
    settle(stored)
    assert talk.in_storage() == talk.values
    assert stored.counts["tokens_stored"] == 10


def test_a_fetched_tail_follows_the_remaining_copy(cache, stored, file, talk):
    stored.store("a", 2)
    settle(stored)
    stored.fetch("a", now_s=5.0)
    assert stored.is_fetching("a", 5.0 + WAIT_S / 2)
    assert not stored.is_fetching("a", 5.0 + WAIT_S)
    assert settle(stored) == ["a"]
    assert talk.on_host() == talk.values
    assert stored.end_of("a", -1) == -1
    assert not stored.is_fetching("a", 5.0)
    assert (file.n_free, stored.counts["tokens_fetched"]) == (4, 6)


def test_a_full_file_takes_nothing(stored, file, talk):
    file.take(3)
    assert not stored.store("a", 2)
    assert settle(stored) == []
    assert talk.on_host() == talk.values


def test_nothing_is_fetched_from_a_damaged_page_on(cache, stored, file, talk):
    stored.store("a", 3)
    settle(stored)
    place = stored._tails["a"].places[1]
    os.pwrite(file._file.fileno(), b"\xff", place * 4 * BYTES_PER_VALUE)
    stored.fetch("a", now_s=0.0)
    settle(stored)
    assert talk.on_host() == talk.values[:4]
    assert stored.counts["pages_damaged"] == 2
    assert (file.n_free, cache.host_pool_group.available_size()) == (4, 44)


def test_a_failing_disk_loses_only_its_capacity(cache, stored, file, talk, monkeypatch):
    def full(place, page):
        raise OSError("no space left on device")

    monkeypatch.setattr(file, "write", full)
    stored.store("a", 2)
    settle(stored)
    assert talk.on_host() == talk.values
    assert file.n_free == 4
    assert stored.counts["storage_writes_failed"] == 1


def test_without_host_memory_a_tail_stays_in_storage(cache, stored, talk):
    stored.store("a", 2)
    settle(stored)
    cache.host_pool_group.alloc(cache.host_pool_group.available_size())
    stored.fetch("a", now_s=0.0)
    assert not stored.is_fetching("a", 0.0)
    assert stored.counts["fetches_without_room"] == 1
    assert talk.in_storage() == talk.values[4:]


def test_a_session_that_continues_without_waiting_gets_no_stale_tail(cache, stored, file, talk):
    stored.store("a", 2)
    settle(stored)
    stored.fetch("a", now_s=0.0)
    talk.values[4:] = []  # its next request computes it otherwise
    talk.turn(9, first=50)
    talk.write()
    settle(stored)
    acknowledge(cache, stored._copies)
    assert talk.on_host() == talk.values
    assert (stored.tokens, file.n_free) == (0, 4)


def test_tokens_loaded_while_they_are_stored_stay(cache, stored, file, talk):
    stored.store("a", 2)
    talk.load(10)
    settle(stored)
    acknowledge(cache, stored._copies)
    assert talk.on_host() == talk.on_device() == talk.values
    assert file.n_free == 4


def test_when_sglang_empties_the_host_nothing_is_left(cache, stored, file, talk):
    stored.store("a", 1)
    settle(stored)
    stored.fetch("a", now_s=0.0)
    stored.reset()
    assert (stored.tokens, file.n_free) == (0, 4)
    assert settle(stored) == []


def test_a_completion_counts_when_all_ranks_have_it(cache, file, talk, stored):
    slower = StoredTails(stored._copies, file, lambda numbers: [0] * len(numbers))
    slower.store("a", 2)
    assert settle(slower) == []
    assert cache.host_pool_group.available_size() == 36
