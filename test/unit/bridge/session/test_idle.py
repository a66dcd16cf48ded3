"""The order of eviction among idle sessions."""

import pytest

from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.kv import lazy_heap
from sglang_live.kv.preload import PROTECTED_S
from sglang_live.messages import NextUseHint

PAGE = 16


@pytest.fixture
def idle():
    sessions = IdleSessions(PAGE)
    sessions.tick(100.0)
    return sessions


def next_use(session: str, to_play_s: float, gap_s: float | None = 0.5) -> NextUseHint:
    return NextUseHint(session, to_play_s, gap_s, None)


def test_the_session_with_the_longest_playback_is_evicted_first(idle):
    for session, to_play_s in (("soon", 1.0), ("late", 20.0), ("later", 30.0)):
        idle.put(session, 64)
        idle.expect(next_use(session, to_play_s))
    assert idle.pick_victims(100) == [("later", 64), ("late", 48)]


def test_a_hint_may_come_before_the_session_is_idle(idle):
    idle.expect(next_use("late", 20.0))
    idle.put("late", 64)
    idle.put("soon", 64)
    idle.expect(next_use("soon", 1.0))
    assert idle.pick_victims(64) == [("late", 64)]


def test_a_hint_after_a_partial_eviction_adds_no_tokens(idle):
    idle.put("a", 64)
    assert idle.pick_victims(16) == [("a", 16)]
    idle.expect(next_use("a", 5.0))
    assert idle.tokens == 48
    idle.pick_victims(48)
    idle.expect(next_use("a", 6.0))
    assert idle.tokens == 0 and "a" not in idle


def test_without_hints_the_least_recently_used_session_is_evicted(idle):
    idle.put("old", 64)
    idle.tick(101.0)
    idle.put("new", 64)
    assert idle.pick_victims(64) == [("old", 64)]
    assert idle.report()["victims_by_lru"] == 1


def test_the_average_gap_of_all_users_replaces_an_unknown_one(idle):
    for _ in range(300):
        idle.expect(NextUseHint("other", 0.0, None, 25.0))
    for session in ("unknown", "quick"):
        idle.put(session, 64)
    idle.expect(next_use("unknown", 0.0, None))
    idle.expect(next_use("quick", 10.0, 0.2))
    assert idle.pick_victims(64) == [("unknown", 64)]


def test_a_speaking_users_session_is_evicted_last_until_its_request_ends(idle):
    idle.put("speaks", 64)
    idle.expect(next_use("speaks", 30.0))
    idle.speech_started("speaks")
    idle.remove("speaks")  # its request is looked at, and does not fit yet
    idle.put("speaks", 64)
    idle.put("listens", 64)
    idle.expect(next_use("listens", 1.0))
    assert idle.pick_victims(64) == [("listens", 64)]
    idle.remove("speaks")  # its request runs, and ends
    idle.request_ended("speaks")
    idle.put("speaks", 80)
    idle.put("listens", 64)
    assert idle.pick_victims(80) == [("speaks", 80)]


def test_protected_sessions_are_evicted_when_a_request_needs_their_memory(idle):
    for session in ("one", "two"):
        idle.put(session, 64)
        idle.speech_started(session)
    idle.expect(next_use("two", 30.0))
    assert idle.tokens == 128
    assert idle.next_victim() is None
    assert idle.pick_victims(70, later_than_s=0.0) == []
    assert idle.pick_victims(70) == [("two", 64), ("one", 16)]
    assert idle.tokens == 48 and idle.next_victim() is None  # the rest is protected as before
    assert idle.report()["protected_evicted"] == 2


def test_protection_by_speech_expires(idle):
    idle.put("coughed", 64)
    idle.speech_started("coughed")
    assert idle.next_victim() is None
    idle.tick(100.0 + PROTECTED_S + 0.1)
    assert idle.next_victim().key == "coughed"


def test_a_closed_session_is_forgotten(idle):
    idle.put("a", 64)
    idle.expect(next_use("a", 30.0))
    idle.forget("a")
    idle.put("b", 64)
    idle.expect(next_use("b", 1.0))
    idle.put("a", 64)  # another one of that name
    idle.tick(101.0)
    assert idle.pick_victims(64) == [("b", 64)]


@pytest.mark.parametrize("protected", [False, True])
def test_a_victim_costs_a_number_of_heap_operations_that_does_not_grow(monkeypatch, protected):
    """Counted over a thousand allocations among a thousand sessions, protected or not."""
    idle = IdleSessions(page_size=1)
    idle.tick(100.0)
    for n in range(1000):
        idle.put(f"s{n}", 8)
        if protected:
            idle.protect(f"s{n}", 200.0)
    counted = 0

    def counting(operation):
        def count(*args):
            nonlocal counted
            counted += 1
            return operation(*args)

        return count

    for name in ("heappush", "heappop"):
        monkeypatch.setattr(lazy_heap, name, counting(getattr(lazy_heap, name)))
    for _ in range(1000):
        [(_, n_tokens)] = idle.pick_victims(1)
        assert n_tokens == 1
    assert counted < 5000
