"""Host copies of a session, for any end of transfers and any changes of the session."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.cache_controller import CacheOperation

from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.kv.retention import Compaction
from test.unit.bridge.fake_host import BYTES_PER_TOKEN, ROW, TRANSFER_S, FakeCache

from .host_talk import Talk, acknowledge, end

# --- whatever happens, in whatever order ---


class World:
    """Two sessions. Each step has a number from 0 to 1 for what it leaves open."""

    STEPS = (
        *("turn", "turn_and_write", "turn_and_write", "evict", "bring_back", "bring_back"),
        *(
            "truncate",
            "compact",
            "compact",
            "close",
            "begin_in_tree",
            "acknowledge",
            "wait_for_writes",
        ),
    )

    def __init__(self, page: int, host_tokens: int):
        self.cache = FakeCache(page, host_tokens)
        self.copies = HostCopies(self.cache)
        self.talks = [Talk(self.cache, self.copies, name, i) for i, name in enumerate("ab")]
        self._n_values = 0

    def turn(self, talk: Talk, share: float) -> None:
        n_tokens = min(1 + int(9 * share), ROW - 4 - len(talk.values))
        talk.turn(n_tokens, self._n_values)
        self._n_values += n_tokens

    def turn_and_write(self, talk: Talk, share: float) -> None:
        self.turn(talk, share)
        before = held_by(self.copies.of(talk.name))
        if not talk.write():
            assert before == held_by(self.copies.of(talk.name))
        elif len(talk.values) > talk.kv.cache_protected_len:
            assert self.copies.of(talk.name).end == len(talk.values)

    def begin_in_tree(self, talk: Talk, share: float) -> None:
        if not talk.values and not len(talk.of_tree):
            talk.turn(ROW // 4, self._n_values)
            self._n_values += ROW // 4
            talk.hand_to_tree(4 + int(2 * share) * 4)

    def evict(self, talk: Talk, share: float) -> None:
        own = talk.up(talk.kv.kv_allocated_len) - talk.kv.cache_protected_len
        if own > 0:
            n_pages = int(share * own / talk.page)
            talk.evict(talk.kv.cache_protected_len + n_pages * talk.page)

    def bring_back(self, talk: Talk, share: float) -> None:
        if (n_tokens := talk.n_on_host_alone) == 0:
            return
        if share < 0.5:
            talk.preload()
        else:
            talk.load(max(1, int((2 * share - 1) * n_tokens)))

    def truncate(self, talk: Talk, share: float) -> None:
        first = talk.kv.cache_protected_len
        talk.truncate(first + int((1 - share**2) * (len(talk.values) - first)))

    def compact(self, talk: Talk, share: float) -> None:
        n_pages, owned = len(talk.values) // talk.page, talk.kv.cache_protected_len // talk.page
        begin = int(share * n_pages)
        behind = max(begin + 1 + int(7 * share) % 3, owned)
        if talk.kv.kv_committed_len == len(talk.values) and behind <= n_pages:
            talk.compact(Compaction(begin * talk.page, behind * talk.page))

    def close(self, talk: Talk, share: float) -> None:
        if share < 0.2:
            talk.close()

    def acknowledge(self, talk: Talk, share: float) -> None:
        acknowledge(self.cache, self.copies, most=1 + int(3 * share))

    def wait_for_writes(self, talk: Talk, share: float) -> None:
        """As when SGLang writes back what it evicts."""
        for ack in (queue := self.cache.cache_controller.ack_write_queue):
            end(self.cache, ack)
        queue.clear()
        self.copies.all_written()

    def check(self) -> None:
        for talk in self.talks:
            if talk.arrival is None:
                assert talk.on_device() == talk.values[: talk.kv.kv_committed_len]
            copy = self.copies.of(talk.name)
            if copy is None:
                continue
            assert copy.begin % talk.page == 0
            assert len(copy.slots) == talk.up(copy.end - copy.begin)
            if not copy.busy:
                assert copy.written is None
                assert talk.on_host() == talk.values[copy.begin : copy.end]


def held_by(copy) -> tuple | None:
    return None if copy is None else (copy.begin, copy.end, copy.slots.tolist())


STEP = st.tuples(st.sampled_from(World.STEPS), st.integers(0, 1), st.floats(0, 1, exclude_max=True))


@settings(max_examples=60)
@given(st.sampled_from((1, 4)), st.sampled_from((32, 256)), st.lists(STEP, min_size=40))
def test_the_host_has_exactly_the_tokens_it_reports(page, host_tokens, steps):
    world = World(page, host_tokens)
    for step, talk, share in steps:
        getattr(world, step)(world.talks[talk], share)
        world.check()
    for talk in world.talks:
        talk.close()
    acknowledge(world.cache, world.copies)
    assert world.copies.tokens == 0
    for pool in (world.cache.host_pool_group, world.cache.device_pool):
        assert pool.available_size() == pool.n_slots


# --- one thing at a time ---


@pytest.fixture
def cache():
    return FakeCache(page=4, host_tokens=48)


@pytest.fixture
def copies(cache):
    return HostCopies(cache)


@pytest.fixture
def talk(cache, copies):
    talk = Talk(cache, copies, "a")
    talk.turn(10)
    return talk


def test_a_turn_transfers_its_own_tokens_and_the_page_that_was_not_full(cache, copies, talk):
    assert talk.write()
    acknowledge(cache, copies)
    talk.turn(7)
    assert talk.write()
    [ack] = cache.cache_controller.ack_write_queue
    assert ack.num_bytes == 12 * BYTES_PER_TOKEN  # tokens 8 to 16, in whole pages
    assert copies.counts["tokens_written"] == copies.tokens == 17
    acknowledge(cache, copies)
    assert talk.on_host() == talk.values


def test_tokens_on_the_host_are_not_written_again(cache, talk):
    talk.write()
    assert talk.write()
    assert len(cache.cache_controller.ack_write_queue) == 1


def test_a_sessions_prefix_in_the_tree_is_not_copied(cache, copies, talk):
    talk.hand_to_tree(4)
    talk.write()
    acknowledge(cache, copies)
    assert talk.on_host() == talk.values[4:]


def test_a_compaction_that_reaches_into_the_trees_part_keeps_the_copy(cache, copies, talk):
    talk.turn(10, first=11)
    talk.hand_to_tree(8)
    talk.write()
    acknowledge(cache, copies)
    talk.compact(Compaction(4, 12))
    assert copies.of("a").begin == 4
    assert talk.on_host() == talk.values[4:] == list(range(13, 21))


def test_a_compaction_before_the_copy_drops_the_copy(cache, copies, talk):
    talk.turn(10, first=11)
    talk.hand_to_tree(12)
    talk.write()
    acknowledge(cache, copies)
    talk.kv.cache_protected_len = 0  # as when the tree's part was handed over first
    copies.compact("a", Compaction(0, 8))
    assert copies.of("a") is None
    assert cache.host_pool_group.available_size() == 48


def test_a_copy_that_begins_too_late_is_replaced(cache, copies, talk):
    talk.hand_to_tree(8)
    talk.write()
    acknowledge(cache, copies)
    talk.kv.cache_protected_len = 0
    talk.write()
    acknowledge(cache, copies)
    assert talk.on_host() == talk.values
    assert cache.host_pool_group.available_size() == 48 - 12


def test_a_load_waits_for_the_write_that_it_reads(cache, copies, talk):
    talk.write()
    device = copies.load(copies.of("a"), 0, 10)
    cache.cache_controller.start_loading().wait()
    assert cache.device_pool.values[device[:10]].tolist() == talk.values
    talk.turn(6, first=11)
    talk.write()
    device = cache.device_pool.alloc(16)
    copies.preload(copies.of("a"), 0, 16, device).wait()
    assert cache.device_pool.values[device].tolist() == talk.values


def test_transfers_in_both_directions_wait_for_a_running_step(cache, copies, talk):
    """The last step of a retracted request, and of the slots' previous owner."""
    slots, forward = talk.row[:10].long(), cache.cache_controller.load_fence_stream
    late = torch.arange(50, 60)
    forward.submit(lambda: cache.device_pool.values.index_put_((slots,), late))
    talk.write()
    acknowledge(cache, copies)
    assert talk.on_host() == late.tolist()
    device = cache.device_pool.alloc(12)
    forward.submit(lambda: cache.device_pool.values.index_fill_(0, device, 7))
    copies.preload(copies.of("a"), 0, 10, device).wait()
    assert cache.device_pool.values[device[:10]].tolist() == late.tolist()


def test_memory_of_a_forgotten_copy_waits_for_its_transfers(cache, copies, talk):
    talk.write()
    copies.forget("a")
    assert copies.of("a") is None
    assert cache.host_pool_group.available_size() == 36
    acknowledge(cache, copies)
    assert cache.host_pool_group.available_size() == 48


def test_a_copy_is_being_written_until_its_last_write_is_acknowledged(cache, copies, talk):
    talk.write()
    talk.turn(4)
    talk.write()
    acknowledge(cache, copies, most=1)
    assert copies.of("a").written is not None
    acknowledge(cache, copies)
    assert copies.of("a").written is None


def test_on_a_full_host_the_trees_copies_are_evicted(cache, talk):
    cache.of_tree = cache.host_pool_group.alloc(44)
    assert talk.write()
    assert len(cache.of_tree) == 36


def test_a_full_host_refuses_and_changes_nothing(cache, copies, talk):
    talk.write()
    acknowledge(cache, copies)
    cache.host_pool_group.alloc(36)
    talk.turn(10, first=11)
    assert not talk.write()
    assert copies.counts["writes_host_full"] == 1
    assert talk.on_host() == talk.values[:10]
    talk.truncate(12)
    assert talk.write()  # within the page it has


def test_copies_are_merged_with_writes_that_the_tree_has_queued(cache, copies, talk):
    host, device = cache.host_pool_group.alloc(4), cache.device_pool.alloc(4)
    cache.cache_controller.write_queue.append(CacheOperation(host, device, node_id=7))
    talk.write()
    [ack] = cache.cache_controller.ack_write_queue
    ack.finish_event.synchronize()
    assert [copies.acknowledged(transfer) for transfer in ack.node_ids] == [False, True]
    assert talk.on_host() == talk.values


def test_writes_give_the_rate_until_a_load_was_measured(cache, copies, talk):
    assert copies.rate().bytes_per_s is None
    talk.evict(0)
    acknowledge(cache, copies)
    assert copies.rate().bytes_per_s == 12 * BYTES_PER_TOKEN / TRANSFER_S
    talk.load(6)
    acknowledge(cache, copies)
    assert copies.rate().bytes_per_s == 8 * BYTES_PER_TOKEN / TRANSFER_S


def test_only_loads_that_a_prefill_waits_for_count_as_reload_time(cache, copies, talk):
    talk.evict(0)
    talk.preload()
    acknowledge(cache, copies)
    assert (copies.counts["reload_s"], copies.counts["tokens_preloaded"]) == (0, 10)
    talk.evict(0)
    talk.load(10)
    acknowledge(cache, copies)
    assert (copies.counts["reload_s"], copies.counts["tokens_loaded"]) == (TRANSFER_S, 10)


def test_a_load_without_device_memory_leaves_the_copy_as_it_is(cache, copies, talk):
    talk.evict(0)
    acknowledge(cache, copies)
    cache.device_pool.alloc(cache.device_pool.available_size())
    assert copies.load(copies.of("a"), 0, 10) is None
    assert not copies.of("a").busy
    assert copies.counts["tokens_loaded"] == 0
