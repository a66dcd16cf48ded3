"""Claims about a session's copy in lent pages or on the host, in any order of events.

Copies and their rules are the real ones; pools and transfers are fakes that end as late as
possible, and that overwrite what is freed.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.bridge.round_facts import LinkRate
from sglang_live.bridge.tiers.host_copies import HostCopies, transfer_numbers
from sglang_live.bridge.tiers.tier_copies import TierCopies
from sglang_live.extensions.lending.engine.peer_copies import PeerCopies
from sglang_live.extensions.lending.engine.peer_pool import PEER_SLOTS
from sglang_live.extensions.lending.slots import PeerSlots
from test.unit.bridge.fake_host import FREED, ROW, FakeCache, FakeController, FakeEngine
from test.unit.bridge.tiers.host_talk import Talk
from test.unit.bridge.tiers.test_host_copies import World

LEASES = {"first": 32, "second": 48}


class LentValues:
    """What lent slots hold; what is freed is overwritten at once."""

    def __init__(self):
        self.values = torch.full((sum(LEASES.values()),), FREED)

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        return slots - PEER_SLOTS


class TwoTierEngine(FakeEngine):
    def __init__(self, host, device, lent: LentValues):
        super().__init__(host, device)
        self._lent = lent

    def _read(self, slots: torch.Tensor) -> torch.Tensor:
        is_lent = slots >= PEER_SLOTS
        found = torch.empty(len(slots), dtype=torch.int64)
        found[is_lent] = self._lent.values[self._lent.at(slots[is_lent])]
        found[~is_lent] = self._host.values[slots[~is_lent]]
        return found

    def _write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        is_lent = slots >= PEER_SLOTS
        self._lent.values[self._lent.at(slots[is_lent])] = values[is_lent]
        self._host.values[slots[~is_lent]] = values[~is_lent]

    def submit_device_to_host(self, to, device=None):
        if device is None:  # a move, in SGLang's form
            (move,) = to
            done = self.device_to_host_stream.submit(
                lambda: self._write(move.host_indices, self._read(move.device_indices))
            )
            return FakeController._completion(done)
        return self.device_to_host_stream.submit(
            lambda: self._write(to, self._device.values[device])
        )

    def submit_host_to_device(self, transfer, transfer_layer_id_max):
        slots, device = transfer

        def copy() -> None:
            self._device.values[device] = self._read(slots)

        return FakeController._completion(self.host_to_device_stream.submit(copy))


class LentCopies(PeerCopies):
    """Real, but for the pools behind its slots."""

    def __init__(self, cache: FakeCache, numbers, lent: LentValues):
        self.slots, self._pools, self._lent = PeerSlots(), {}, lent
        first = 0
        for name, n in LEASES.items():
            self.slots.add(name, PEER_SLOTS + np.arange(first, first + n))
            first += n
        super(PeerCopies, self).__init__(cache, numbers, ("tokens_moved",))

    def free_slots(self, slots: torch.Tensor) -> None:
        super().free_slots(slots)
        self._lent.values[self._lent.at(slots)] = FREED


class BothTiers:
    """What a Talk calls, as the SessionTier does it."""

    def __init__(self, cache: FakeCache):
        lent, numbers = LentValues(), transfer_numbers()
        controller = cache.cache_controller
        controller.l2_transfer_engine = TwoTierEngine(
            cache.host_pool_group, cache.device_pool, lent
        )
        self.host = HostCopies(cache, numbers)
        self.peer = LentCopies(cache, numbers, lent)
        self.all = TierCopies(self.host, (self.peer,))
        self.engine, self._cache = controller.l2_transfer_engine, cache

    def write(self, name: str, kv) -> bool:
        if any(copy.end >= kv.kv_committed_len for _, copy in self.all.of(name)):
            return True
        if self.peer.write(name, kv):
            self.host.forget(name)
            return True
        is_written = self.host.write(name, kv)
        if is_written:
            self.peer.forget(name)
        return is_written

    def of(self, name: str):
        found = self.all.of(name)
        return found[0][1] if found else None

    def _tier(self, copy):
        of_peer = [one for tier, one in self._all_found() if tier is self.peer]
        return self.peer if any(one is copy for one in of_peer) else self.host

    def _all_found(self):
        return [found for name in "ab" for found in self.all.of(name)]

    def load(self, copy, begin, stop):
        return self._tier(copy).load(copy, begin, stop)

    def preload(self, copy, begin, stop, device):
        return self._tier(copy).preload(copy, begin, stop, device)

    def forget(self, name: str) -> None:
        for tier, _ in self.all.of(name):
            tier.forget(name)

    def truncate(self, name: str, n: int) -> None:
        for tier, _ in self.all.of(name):
            tier.truncate(name, n)

    def compact(self, name: str, compaction) -> None:
        for tier, _ in self.all.of(name):
            tier.compact(name, compaction)

    def values_of(self, copy) -> list[int]:
        return self.engine._read(copy.slots[: copy.end - copy.begin]).tolist()


class TwoTiers(World):
    STEPS = (*World.STEPS, "move", "move", "recall")

    def __init__(self, page: int, host_tokens: int):
        self.cache = FakeCache(page, host_tokens)
        self.copies = BothTiers(self.cache)
        self.talks = [Talk(self.cache, self.copies, name, i) for i, name in enumerate("ab")]
        self._n_values = 0

    def move(self, talk: Talk, share: float) -> None:
        copies = self.copies
        copy = copies.peer.of(talk.name)
        if copy is not None and not copy.busy:
            copies.peer.move(talk.name, copies.host)

    def recall(self, talk: Talk, share: float) -> None:
        """All copies in the second lease leave; it ends when no slot of it is in a transfer."""
        peer, lease = self.copies.peer, "second"
        if lease not in peer.slots:
            return
        peer.slots.close(lease)
        for name in peer.sessions_in(lease):
            if not peer.of(name).busy and not peer.move(name, self.copies.host):
                peer.forget(name)
        if not peer.slots.n_used(lease):
            peer.slots.remove(lease)

    def acknowledge(self, talk: Talk, share: float) -> None:
        acknowledge(self.cache, self.copies, most=1 + int(3 * share))

    def wait_for_writes(self, talk: Talk, share: float) -> None:
        for ack in (queue := self.cache.cache_controller.ack_write_queue):
            finish(self.cache, ack)
        queue.clear()
        self.copies.all.all_written()

    def check(self) -> None:
        for talk in self.talks:
            if talk.arrival is None:
                assert talk.on_device() == talk.values[: talk.kv.kv_committed_len]
            found = self.copies.all.of(talk.name)
            assert len(found) <= 1  # a copy that moves is the host's at once
            for _, copy in found:
                assert len(copy.slots) == talk.up(copy.end - copy.begin)
                if not copy.busy:
                    assert copy.written is None
                    assert self.copies.values_of(copy) == talk.values[copy.begin : copy.end]


def finish(cache: FakeCache, ack) -> None:
    ack.finish_event.synchronize()
    for transfer in ack.node_ids:
        cache.host_pool_group.in_transfer.pop(transfer, None)  # a move has no slots there


def acknowledge(cache: FakeCache, copies: BothTiers, most: int = ROW) -> None:
    controller = cache.cache_controller
    for queue, measure in (
        (controller.ack_write_queue, copies.all.measure_write),
        (controller.ack_load_queue, copies.all.measure_load),
    ):
        for ack in queue[:most]:
            finish(cache, ack)
            measure(ack)
            assert all([copies.all.acknowledged(transfer) for transfer in ack.node_ids])
        del queue[:most]


STEP = st.tuples(
    st.sampled_from(TwoTiers.STEPS), st.integers(0, 1), st.floats(0, 1, exclude_max=True)
)


@settings(max_examples=80)
@given(st.sampled_from((1, 4)), st.sampled_from((32, 256)), st.lists(STEP, min_size=40))
def test_a_tier_has_exactly_the_tokens_it_reports(page, host_tokens, steps):
    world = TwoTiers(page, host_tokens)
    for step, talk, share in steps:
        getattr(world, step)(world.talks[talk], share)
        world.check()
    for talk in world.talks:
        talk.close()
    acknowledge(world.cache, world.copies)
    slots = world.copies.peer.slots
    assert world.copies.host.tokens == world.copies.peer.tokens == 0
    for name in LEASES:
        assert name not in slots or slots.n_used(name) == 0
    for pool in (world.cache.host_pool_group, world.cache.device_pool):
        assert pool.available_size() == pool.n_slots


@pytest.fixture
def world():
    return TwoTiers(page=1, host_tokens=64)


def test_lent_pages_come_before_the_host(world):
    talk = world.talks[0]
    talk.turn(20, 100)
    assert talk.write()
    assert world.copies.peer.of("a").end == 20 and world.copies.host.of("a") is None
    acknowledge(world.cache, world.copies)
    assert world.copies.peer.to_tier.bytes_per_s and not world.copies.host.to_tier.bytes_per_s


def test_full_lent_pages_leave_the_host(world):
    world.copies.peer.slots.take(75)
    talk = world.talks[0]
    talk.turn(20, 100)
    assert talk.write()
    assert world.copies.peer.of("a") is None and world.copies.host.of("a").end == 20


def test_a_copy_moves_to_the_host_while_its_session_goes_on(world):
    talk = world.talks[0]
    talk.turn(20, 100)
    talk.write()
    acknowledge(world.cache, world.copies)
    assert world.copies.peer.move("a", world.copies.host)
    assert world.copies.peer.slots.n_free == 60  # its slots are free when the transfer has ended
    talk.evict(0)
    talk.load(20)
    assert talk.on_device() == talk.values
    acknowledge(world.cache, world.copies)
    assert world.copies.peer.slots.n_free == 80


def test_of_two_equal_copies_that_of_the_link_which_rank_0_found_faster_is_loaded(world):
    """All ranks load the same copy, whatever each has measured itself."""
    talk, tiers = world.talks[0], world.copies.all
    talk.turn(20, 100)
    talk.write()
    acknowledge(world.cache, world.copies)
    assert world.copies.peer.move("a", world.copies.host)
    world.copies.peer._copies["a"] = world.copies.host._copies["a"]  # equal ones
    slow, fast = LinkRate(1.0, 0.0), LinkRate(2.0, 0.0)
    for rates, tier in (((slow, fast), world.copies.peer), ((fast, slow), world.copies.host)):
        tiers.rates = rates
        assert tiers.behind("a", 10)[0] is tier


def test_a_full_host_keeps_the_copy_where_it_is(world):
    talk = world.talks[0]
    talk.turn(20, 100)
    talk.write()
    acknowledge(world.cache, world.copies)
    world.cache.host_pool_group.alloc(64)
    assert not world.copies.peer.move("a", world.copies.host)
    assert world.copies.peer.of("a").end == 20 and not world.copies.peer.of("a").busy


def test_a_load_is_measured_on_its_own_link(world):
    for talk in world.talks:
        talk.turn(10, 100)
        talk.write()
    acknowledge(world.cache, world.copies)
    assert world.copies.peer.move("b", world.copies.host)
    acknowledge(world.cache, world.copies)
    assert world.copies.host.to_tier.bytes_per_s  # the move
    world.talks[0].evict(0)
    world.talks[0].load(10)
    assert world.copies.all.bytes_in_transfer(nearer=True) > 0
    assert world.copies.all.bytes_in_transfer(nearer=False) == 0
    acknowledge(world.cache, world.copies)
    assert world.copies.peer.to_device.bytes_per_s and not world.copies.host.to_device.bytes_per_s
