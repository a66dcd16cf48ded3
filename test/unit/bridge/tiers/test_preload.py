"""The sessions whose KV is preloaded, and when."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.bridge.round_facts import LinkRate
from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.tiers.preload import Preloads
from sglang_live.kv.preload import PROTECTED_S, REMAINING_SPEECH_S, PreloadConfig
from sglang_live.messages import NextUseHint

START_S = 100.0
# At most 200 of them are preloaded and unused, 110 before speech, and 50 are kept free.
POOL_TOKENS = 1000
BYTES_PER_TOKEN = 1000
FAST = LinkRate(1e9, 0.0)
CONFIG = PreloadConfig(retry_s=0.05, max_protected_share=0.2, max_expected_share=0.11)


class FakeAllocator:
    size = POOL_TOKENS

    def __init__(self):
        self.n_free = POOL_TOKENS

    def available_size(self) -> int:
        return self.n_free


class FakeTree:
    page_size = 1

    def __init__(self, allocator: FakeAllocator):
        self.token_to_kv_pool_allocator, self.n_tokens = allocator, 0

    def tree_evictable_size(self) -> int:
        return self.n_tokens

    def evict_tree(self, n_tokens: int) -> int:
        evicted = min(n_tokens, self.n_tokens)
        self.n_tokens -= evicted
        self.token_to_kv_pool_allocator.n_free += evicted
        return evicted


class FakeTier:
    """on_host: by session, tokens that are nowhere else. brought: what was preloaded, in order.

    ends_transfers: at the end of each round.
    """

    def __init__(self, sessions: "FakeSessions"):
        self._sessions = sessions
        self.copies = SimpleNamespace(bytes_per_token=BYTES_PER_TOKEN, bytes_to_device=0)
        self.all = SimpleNamespace(bytes_in_transfer=self._bytes_in_transfer)
        self.counts = {"preloads": 0.0}
        self.ends_transfers = True
        self.on_host: dict[str, int] = {}
        self.brought: list[str] = []
        self.has_rows, self.loads = True, self

    def has_spare_row(self, session_id: str) -> bool:
        return self.has_rows

    def is_nearer(self, session_id: str) -> bool:
        return False

    def _bytes_in_transfer(self, nearer: bool) -> int:
        return 0 if nearer else self.copies.bytes_to_device

    def keeping(self, session_id: str):
        return nullcontext()

    def tokens_to_preload(self, session_id: str) -> int:
        return self.on_host.get(session_id, 0)

    def preload(self, session_id: str, most_tokens: int) -> int:
        allocator = self._sessions.allocator
        n_tokens = min(self.on_host[session_id], most_tokens)
        if not self.has_rows or n_tokens > allocator.n_free:
            return 0
        allocator.n_free -= n_tokens
        self._sessions.on_device[session_id] += n_tokens
        self.on_host[session_id] -= n_tokens
        if not self.on_host[session_id]:
            del self.on_host[session_id]
        if session_id not in self.brought[-1:]:
            self.brought.append(session_id)
        self.copies.bytes_to_device += n_tokens * BYTES_PER_TOKEN
        return n_tokens


class FakeSessions:
    """Memory of idle sessions, ranked by the real IdleSessions; tokens are plain numbers."""

    def __init__(self):
        self.allocator = FakeAllocator()
        self.cache = FakeTree(self.allocator)
        self.idle = IdleSessions(page_size=1)
        self.tier = FakeTier(self)
        self.on_device: dict[str, int] = {}
        self.preloads = Preloads(self, CONFIG)
        self.tick(START_S)

    # --- what Preloads calls ---

    def resized(self, session_id: str) -> None:
        self.idle.put(session_id, self.on_device[session_id])

    def evict_idle(self, n_tokens: int, later_than_s: float = float("-inf")) -> None:
        for session_id, n_victim in self.idle.pick_victims(n_tokens, later_than_s):
            self.on_device[session_id] -= n_victim
            self.tier.on_host[session_id] = self.tier.on_host.get(session_id, 0) + n_victim
            self.allocator.n_free += n_victim
            self._expect(session_id)

    def _expect(self, session_id: str) -> None:
        now_s, expected_s = self.idle.now_s, self.idle.expected_s(session_id)
        self.preloads.expect(session_id, now_s, expected_s)

    # --- what happens to them ---

    def tick(self, now_s: float, rate: LinkRate = FAST) -> None:
        self.idle.tick(now_s)
        self.preloads.tick(now_s, rate)
        self.end_round()

    def end_round(self) -> None:
        if self.tier.ends_transfers:
            self.tier.copies.bytes_to_device = 0
        self.preloads.load()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            self.tick(self.idle.now_s + 0.01)

    def replied(self, session_id: str, n_tokens: int) -> None:
        """It is idle, all on the device."""
        self.allocator.n_free -= n_tokens
        self.on_device[session_id] = n_tokens
        self.resized(session_id)

    def on_host(self, session_id: str, n_tokens: int) -> None:
        self.on_device[session_id] = 0
        self.tier.on_host[session_id] = n_tokens

    def plays(self, session_id: str, for_s: float) -> None:
        """It will be needed 2 s later: a gap, and an utterance."""
        self.idle.expect(NextUseHint(session_id, for_s, 0.43, None))
        self._expect(session_id)

    def speaks(self, session_id: str) -> None:
        self.idle.speech_started(session_id)
        self.preloads.speech_started(session_id, self.idle.now_s)
        self.end_round()

    def coughs(self, session_id: str) -> None:
        """What seemed to be speech was none."""
        self.idle.speech_dismissed(session_id)
        self.preloads.cancel(session_id)
        self._expect(session_id)

    def asks(self, session_id: str) -> None:
        """Its request comes."""
        self.preloads.forget(session_id)
        self.idle.remove(session_id)

    @property
    def skipped(self) -> dict[str, float]:
        return self.preloads.report()


@pytest.fixture
def sessions():
    return FakeSessions()


# --- speaking users ---


def test_a_speaking_users_kv_is_preloaded_and_protected_until_used(sessions):
    sessions.on_host("a", 100)
    sessions.speaks("a")
    assert sessions.tier.brought == ["a"]
    sessions.idle.request_ended("a")  # ends the protection by speech
    sessions.run(PROTECTED_S - 0.1)
    assert sessions.idle.next_victim() is None
    sessions.run(0.2)
    assert sessions.idle.next_victim().key == "a"


def test_speech_protects_longer_than_a_preload(sessions):
    sessions.on_host("a", 100)
    sessions.speaks("a")
    sessions.run(5)
    sessions.speaks("a")
    sessions.run(PROTECTED_S - 0.1)  # a preload is protected from its transfer on
    assert sessions.idle.next_victim() is None


@pytest.mark.parametrize(
    ("n_tokens", "rate", "reason"),
    [
        (0, FAST, "nothing"),
        (100, LinkRate(None, 0.0), "link_unmeasured"),
        (100, LinkRate(5e4, 0.0), "too_late"),  # 2 s, and little more is left
        (100, LinkRate(1e9, 2.0), "too_late"),
    ],
)
def test_a_preload_without_benefit_is_skipped_and_counted(sessions, n_tokens, rate, reason):
    sessions.on_host("a", n_tokens)
    sessions.tick(START_S, rate)
    sessions.speaks("a")
    sessions.run(3)
    assert sessions.tier.brought == []
    assert sessions.skipped == {f"preloads_skipped_{reason}": 1}


def test_a_link_may_be_measured_at_any_time(sessions):
    sessions.on_host("a", 100)
    sessions.tick(START_S + 1, LinkRate(None, 0.0))
    sessions.tick(START_S + 2)
    sessions.speaks("a")
    assert sessions.tier.brought == ["a"]


# --- memory ---


def test_memory_comes_from_the_tree_and_then_from_sessions_needed_later(sessions):
    sessions.replied("soon", 400)
    sessions.replied("late", 500)
    sessions.plays("soon", 0.0)
    sessions.plays("late", 30.0)
    sessions.allocator.n_free = 20
    sessions.cache.n_tokens = 80
    sessions.on_host("a", 150)
    sessions.speaks("a")
    assert sessions.tier.brought == ["a"]
    assert sessions.cache.n_tokens == 0
    assert (sessions.on_device["soon"], sessions.on_device["late"]) == (400, 450)


def test_a_session_needed_earlier_is_not_evicted(sessions):
    sessions.replied("soon", 1000)
    sessions.plays("soon", 0.0)
    sessions.on_host("a", 100)
    sessions.speaks("a")
    sessions.run(1.5)
    assert sessions.on_device["soon"] == 1000 and sessions.tier.brought == []


def test_with_all_memory_in_use_the_prefill_loads(sessions):
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 0
    sessions.speaks("a")
    sessions.run(PROTECTED_S + REMAINING_SPEECH_S)
    assert sessions.tier.brought == []
    assert sessions.skipped == {"preloads_skipped_memory": 1}


def test_an_idle_engine_is_told_when_the_next_preload_is_judged(sessions):
    assert sessions.preloads.next_review_s == math.inf
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 0
    sessions.speaks("a")
    assert sessions.preloads.next_review_s == START_S + CONFIG.retry_s
    sessions.asks("a")
    assert sessions.preloads.next_review_s == math.inf


def test_a_preload_waits_as_long_as_the_user_speaks(sessions):
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 0
    sessions.speaks("a")
    sessions.run(2 * REMAINING_SPEECH_S)
    sessions.allocator.n_free = POOL_TOKENS
    sessions.run(CONFIG.retry_s)
    assert sessions.tier.brought == ["a"]


@pytest.mark.parametrize("n_free", [0, 90])
@pytest.mark.parametrize("ends", ["room", "asks", "coughs"])
def test_kv_of_a_user_who_speaks_is_wanted_while_it_waits_for_room(sessions, n_free, ends):
    sessions.on_host("a", 100)
    assert not sessions.preloads.waits_for_room
    sessions.allocator.n_free = n_free
    sessions.speaks("a")
    assert sessions.preloads.waits_for_room
    if ends == "room":
        sessions.allocator.n_free = 500
        sessions.run(2 * CONFIG.retry_s)
    elif ends == "asks":
        sessions.asks("a")
    else:
        sessions.coughs("a")
    assert not sessions.preloads.waits_for_room


def test_kv_of_a_silent_user_is_not_wanted(sessions):
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 0
    sessions.plays("a", 0.5)
    sessions.run(1.2)
    assert sessions.preloads.next_review_s < math.inf
    assert not sessions.preloads.waits_for_room


def test_memory_that_comes_in_time_is_used(sessions):
    sessions.replied("soon", 1000)
    sessions.plays("soon", 0.0)
    sessions.on_host("a", 100)
    sessions.speaks("a")
    sessions.run(0.3)
    assert sessions.tier.brought == [] and sessions.skipped == {}
    sessions.allocator.n_free = 150
    sessions.run(CONFIG.retry_s)
    assert sessions.tier.brought == ["a"]


def test_running_requests_keep_a_reserve(sessions):
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 149
    sessions.speaks("a")
    sessions.run(0.1)
    assert (sessions.on_device["a"], sessions.allocator.n_free) == (99, 50)


def test_a_request_ends_the_wait(sessions):
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 0
    sessions.speaks("a")
    sessions.run(0.1)
    sessions.asks("a")
    sessions.allocator.n_free = POOL_TOKENS
    sessions.run(1)
    assert sessions.tier.brought == []
    assert sessions.skipped == {"preloads_overtaken_memory": 1}


def test_preloads_of_silent_users_leave_memory_for_speaking_ones(sessions):
    for name in ("may-a", "may-b", "does"):
        sessions.on_host(name, 80)
    sessions.plays("may-a", 0.0)
    sessions.plays("may-b", 0.0)
    sessions.run(1.1)
    assert (sessions.on_device["may-a"], sessions.on_device["may-b"]) == (80, 30), "110 in all"
    sessions.speaks("does")
    assert sessions.on_device["does"] == 80


def test_without_a_free_row_nothing_is_preloaded(sessions):
    sessions.on_host("a", 100)
    sessions.tier.has_rows = False
    sessions.speaks("a")
    sessions.run(1)
    assert sessions.tier.brought == []
    sessions.tier.has_rows = True
    sessions.run(CONFIG.retry_s)
    assert sessions.tier.brought == ["a"]


def test_a_request_that_comes_before_a_row_is_free_is_counted(sessions):
    sessions.on_host("a", 100)
    sessions.tier.has_rows = False
    sessions.speaks("a")
    sessions.run(1)
    sessions.asks("a")
    assert sessions.skipped == {"preloads_overtaken_rows": 1}


def test_as_much_is_loaded_as_there_is_room_for_and_the_rest_when_there_is_more(sessions):
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 90
    sessions.speaks("a")
    assert sessions.on_device["a"] == 40, "less the reserve"
    sessions.run(1)
    assert sessions.on_device["a"] == 40
    sessions.allocator.n_free += 30
    sessions.run(CONFIG.retry_s)
    assert sessions.on_device["a"] == 70
    sessions.allocator.n_free += 300
    sessions.run(CONFIG.retry_s)
    assert sessions.on_device["a"] == 100
    assert sessions.tier.counts["preloads"] == 1


def test_a_part_is_protected_and_the_request_ends_the_wait_for_the_rest(sessions):
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 90
    sessions.speaks("a")
    assert sessions.idle.next_victim() is None
    sessions.asks("a")
    sessions.allocator.n_free += 300
    sessions.run(1)
    assert sessions.on_device["a"] == 40
    assert sessions.skipped["preloads_overtaken_memory"] == 1


def test_room_that_is_taken_before_the_transfer_is_waited_for(sessions):
    sessions.on_host("a", 100)
    sessions.tier.ends_transfers = False
    sessions.tick(START_S + 0.01, SLOW)
    sessions.speaks("a")
    assert sessions.on_device["a"] == 20
    sessions.allocator.n_free = 0
    sessions.tier.ends_transfers = True
    sessions.tick(START_S + 0.02, SLOW)
    assert sessions.on_device["a"] == 20
    sessions.allocator.n_free = 500
    for n in range(20):
        sessions.tick(START_S + 0.03 + n / 100, SLOW)
    assert sessions.on_device["a"] == 100


@pytest.mark.parametrize("ends", ["used", "in vain"])
def test_the_preloaded_and_unused_tokens_are_bounded(sessions, ends):
    for name in "ab":
        sessions.on_host(name, 150)
    sessions.speaks("a")
    if ends == "in vain":
        sessions.run(PROTECTED_S - 0.2)
    sessions.speaks("b")
    sessions.run(0.1)
    assert sessions.on_device == {"a": 150, "b": 50}, "200 in all"
    if ends == "used":
        sessions.asks("a")
    sessions.run(0.2)
    assert sessions.on_device["b"] == 150


# --- expected speech ---


def test_a_listening_users_kv_is_preloaded_shortly_before_its_use(sessions):
    sessions.on_host("a", 100)
    sessions.plays("a", 20.0)
    sessions.run(20.9)
    assert sessions.tier.brought == []
    sessions.run(0.2)  # a second is left, to wait for others
    assert sessions.tier.brought == ["a"]


def test_a_preload_over_a_slow_link_begins_earlier(sessions):
    sessions.tick(START_S, LinkRate(5e4, 0.0))
    sessions.on_host("a", 100)
    sessions.plays("a", 20.0)
    for _ in range(1790):
        sessions.tick(sessions.idle.now_s + 0.01, LinkRate(5e4, 0.0))
    assert sessions.tier.brought == []
    for _ in range(20):
        sessions.tick(sessions.idle.now_s + 0.01, LinkRate(5e4, 0.0))
    assert sessions.tier.brought == ["a"]


def test_a_new_hint_replaces_the_one_before(sessions):
    sessions.on_host("a", 100)
    sessions.plays("a", 5.0)
    sessions.run(1)
    sessions.plays("a", 20.0)
    sessions.run(20.9)
    assert sessions.tier.brought == []
    sessions.run(0.2)
    assert sessions.tier.brought == ["a"]


def test_speech_precedes_a_hint(sessions):
    sessions.on_host("a", 100)
    sessions.plays("a", 20.0)
    sessions.speaks("a")
    assert sessions.tier.brought == ["a"]
    sessions.run(30)
    assert sessions.tier.brought == ["a"] and sessions.skipped == {}


def test_a_hint_does_not_cancel_a_speaking_users_wait(sessions):
    sessions.on_host("a", 100)
    sessions.allocator.n_free = 0
    sessions.speaks("a")
    sessions.plays("a", 20.0)
    sessions.run(0.1)
    sessions.allocator.n_free = POOL_TOKENS
    sessions.run(CONFIG.retry_s)
    assert sessions.tier.brought == ["a"]


def test_an_evicted_session_is_preloaded_before_its_use(sessions):
    sessions.replied("a", 100)
    sessions.plays("a", 5.0)
    sessions.evict_idle(100)
    sessions.run(5.9)
    assert sessions.tier.brought == []
    sessions.run(0.2)
    assert sessions.tier.brought == ["a"]


def test_a_session_without_a_hint_is_not_preloaded(sessions):
    sessions.replied("a", 100)
    sessions.evict_idle(100)
    sessions.run(60)
    assert sessions.tier.brought == [] and sessions.skipped == {}


def test_a_closed_session_is_not_reviewed(sessions):
    sessions.on_host("a", 100)
    sessions.plays("a", 5.0)
    sessions.asks("a")
    sessions.run(10)
    assert sessions.tier.brought == [] and sessions.skipped == {}


# --- the link ---

# 20 tokens in 10 ms
SLOW = LinkRate(2e6, 0.0)


def test_a_preload_leaves_the_link_free_for_the_next_round(sessions):
    sessions.on_host("a", 100)
    sessions.tick(START_S + 0.01, SLOW)
    sessions.tier.ends_transfers = False
    sessions.speaks("a")
    assert sessions.tier.on_host["a"] == 80, "as much as the link moves in a round"
    for n in range(5):
        sessions.tick(START_S + 0.02 + n / 100, SLOW)
    assert sessions.tier.on_host["a"] == 80, "it is still in transfer"
    sessions.tier.copies.bytes_to_device = 10 * BYTES_PER_TOKEN
    sessions.tick(START_S + 0.1, SLOW)
    left = 80 - (80 - 10)  # a round of 40 ms, less what is in transfer
    assert sessions.tier.on_host["a"] == pytest.approx(left, abs=1)


def test_the_session_needed_first_is_loaded_first(sessions):
    for name in "ab":
        sessions.on_host(name, 60)
    sessions.tick(START_S + 0.01, SLOW)
    sessions.speaks("a")
    sessions.tick(START_S + 0.02, SLOW)
    sessions.speaks("b")
    for n in range(10):
        sessions.tick(START_S + 0.03 + n / 100, SLOW)
    assert sessions.tier.brought == ["a", "b"]


def test_bytes_in_transfer_make_a_preload_wait_until_it_is_too_late(sessions):
    sessions.on_host("a", 100)
    sessions.tick(START_S + 0.01, SLOW)
    sessions.tier.ends_transfers = False
    # 2 s of the link, and the preload itself takes 50 ms
    sessions.tier.copies.bytes_to_device = 4000 * BYTES_PER_TOKEN
    sessions.speaks("a")
    for n in range(int(100 * (PROTECTED_S + REMAINING_SPEECH_S))):
        sessions.tick(START_S + 0.02 + n / 100, SLOW)
    assert sessions.tier.brought == []
    assert sessions.skipped == {"preloads_skipped_queue": 1}


def test_bytes_in_transfer_may_end_in_time(sessions):
    sessions.on_host("a", 100)
    sessions.tick(START_S + 0.01, SLOW)
    sessions.tier.ends_transfers = False
    sessions.tier.copies.bytes_to_device = 4000 * BYTES_PER_TOKEN
    sessions.speaks("a")
    assert sessions.tier.brought == []
    sessions.tier.ends_transfers = True
    for n in range(20):
        sessions.tick(START_S + 0.02 + n / 100, SLOW)
    assert sessions.tier.brought == ["a"]


def test_a_false_alarm_ends_a_preload_and_its_protection(sessions):
    sessions.on_host("a", 100)
    sessions.tick(START_S + 0.01, SLOW)
    sessions.speaks("a")
    assert (sessions.on_device["a"], sessions.idle.next_victim()) == (20, None)
    sessions.coughs("a")
    for n in range(20):
        sessions.tick(START_S + 0.02 + n / 100, SLOW)
    assert sessions.on_device["a"] == 20, "no more is loaded"
    assert sessions.idle.next_victim().key == "a"
    assert sessions.skipped == {"preloads_cancelled": 1}


def test_after_a_false_alarm_the_preload_waits_for_the_expected_use(sessions):
    sessions.on_host("a", 100)
    sessions.plays("a", 20.0)
    sessions.allocator.n_free = 0
    sessions.speaks("a")
    sessions.coughs("a")
    sessions.allocator.n_free = POOL_TOKENS
    sessions.run(20.9)
    assert sessions.tier.brought == []
    sessions.run(0.2)
    assert sessions.tier.brought == ["a"]


def test_a_request_ends_a_preload_and_loads_the_rest_itself(sessions):
    sessions.on_host("a", 100)
    sessions.tick(START_S + 0.01, SLOW)
    sessions.speaks("a")
    sessions.asks("a")
    for n in range(20):
        sessions.tick(START_S + 0.02 + n / 100, SLOW)
    assert sessions.on_device["a"] == 20
    assert sessions.skipped == {"preloads_overtaken_link": 1}


# --- ranks ---

NAMES = ("a", "b", "c", "d", "e", "f")
EVENT = st.tuples(
    st.sampled_from(("speaks", "coughs", "plays", "asks", "run", "run", "evict")),
    st.sampled_from(NAMES),
    st.floats(0, 5),
)


def lived_through(events) -> FakeSessions:
    sessions = FakeSessions()
    for n, name in enumerate(NAMES):
        sessions.replied(name, 80 + 15 * n)
    for event, name, number in events:
        match event:
            case "speaks":
                sessions.speaks(name)
            case "coughs":
                sessions.coughs(name)
            case "plays":
                sessions.plays(name, number)
            case "asks":
                sessions.asks(name)
            case "run":
                sessions.run(number / 5)
            case "evict":
                sessions.evict_idle(int(number * 100))
        held = sum(sessions.on_device.values()) + sessions.allocator.n_free
        assert held == POOL_TOKENS
    return sessions


@settings(max_examples=60)
@given(st.lists(EVENT, max_size=60))
def test_all_ranks_decide_alike_and_lose_no_memory(events):
    one, other = lived_through(events), lived_through(events)
    assert one.tier.brought == other.tier.brought
    assert one.on_device == other.on_device
    assert one.preloads.report() == other.preloads.report()
