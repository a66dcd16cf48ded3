"""Rows of idle sessions that hold nothing but their part of the tree, and background copies: only
what is taken is looked at."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
from sglang.srt.session.streaming_session import SessionSlot

from sglang_live.bridge.cache.session_cache import SessionCache
from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.session.kv_record import LiveKvInfo, SessionNode
from sglang_live.bridge.tiers import host
from sglang_live.bridge.tiers.host import SessionTier
from sglang_live.bridge.tiers.nearer import NearerTier

IN_TREE = 16


class Counted(OrderedDict):
    """n_looked_at: entries that were iterated over."""

    n_looked_at = 0

    def __iter__(self):
        for key in super().__iter__():
            self.n_looked_at += 1
            yield key

    def values(self):
        return (self[key] for key in self)


class FakeCache(SessionCache):
    """Its rows are numbers; parked: sessions without one, in order."""

    def __init__(self):
        super().__init__(SimpleNamespace(page_size=1, req_to_token_pool=None))
        self.slots, self.idle = Counted(), IdleSessions(page_size=1)
        self.parked: list[SessionSlot] = []

    def add(self, name: str, n_own: int) -> SessionSlot:
        kv = LiveKvInfo(req_pool_idx=len(self.slots))
        kv.cache_protected_len, kv.kv_allocated_len = IN_TREE, IN_TREE + n_own
        self.slots[name] = SessionSlot(kv=kv, virtual_node=SessionNode(name))
        self.resized(name)
        return self.slots[name]

    def park(self, slot: SessionSlot) -> None:
        slot.kv.req_pool_idx = None
        self.parked.append(slot)


@pytest.fixture
def cache():
    return FakeCache()


def test_rows_are_taken_from_sessions_without_own_kv(cache):
    for n in range(100):
        cache.add(f"talks{n}", n_own=5)
    bare = [cache.add(f"bare{n}", n_own=0) for n in range(100)]
    cache.evict_rows(3)
    assert cache.parked == bare[:3]
    assert cache.slots.n_looked_at == 0


def test_a_session_that_has_grown_or_is_pinned_keeps_its_row(cache):
    grown, pinned, left = (cache.add(name, n_own=0) for name in ("grown", "pinned", "left"))
    grown.kv.kv_allocated_len += 4
    cache.resized("grown")
    pinned.virtual_node.n_pins = 1
    cache.evict_rows(1)
    assert cache.parked == [left]
    pinned.virtual_node.n_pins = 0
    cache.resized("pinned")
    cache.evict_rows(1)
    assert cache.parked == [left, pinned]


def test_a_request_holds_for_certain_what_cannot_be_evicted(cache):
    slot = cache.add("talks", n_own=5)
    slot.kv.kv_committed_len = IN_TREE + 5
    # Another request may evict the session before this one begins.
    assert cache.n_kept("talks") == IN_TREE
    assert cache.n_computed("talks") == IN_TREE + 5
    cache.pin(slot.virtual_node)
    assert cache.n_kept("talks") == IN_TREE + 5
    assert cache.n_kept("unknown") == 0


def test_background_copies_look_at_no_more_sessions_than_they_copy(monkeypatch):
    tier = SessionTier.__new__(SessionTier)
    tier._sessions = SimpleNamespace(slots={})
    tier.eviction = SimpleNamespace(store_if_short=lambda: None)
    tier.nearer = NearerTier()
    tier._to_copy = Counted({f"s{n}": None for n in range(1000)})
    monkeypatch.setattr(SessionTier, "_free_share", lambda self: 0.0)
    tier.write_back()
    assert len(tier._to_copy) == 1000 - host._MAX_WRITES_PER_ROUND
    assert next(iter(tier._to_copy)) == "s4", "the longest idle first"
    assert tier._to_copy.n_looked_at == 1
