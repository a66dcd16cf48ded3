"""Who is lost to a stage, and what it leaves there."""

from sglang_live.stages.connectors.callers import LOST_AFTER_TICKS, Callers

ONE, OTHER = b"one", b"other"


def ticks(callers: Callers, n: int = LOST_AFTER_TICKS) -> list:
    return [lost for _ in range(n) for lost in callers.tick()]


def test_a_caller_that_is_heard_between_ticks_is_never_lost():
    callers = Callers()
    for _ in range(3 * LOST_AFTER_TICKS):
        callers.heard(ONE)
        assert callers.tick() == []


def test_a_silent_caller_is_lost_once_with_the_sessions_it_did_not_close():
    callers = Callers()
    callers.heard(ONE)
    for session_id in ("a", "b", ""):
        callers.opens(ONE, session_id)
    callers.closes("a")
    assert ticks(callers, LOST_AFTER_TICKS - 1) == []
    assert callers.tick() == [(ONE, ["b"])]
    assert ticks(callers) == []


def test_a_session_that_a_server_opened_anew_outlives_its_first_connection():
    callers = Callers()
    callers.heard(ONE)
    callers.opens(ONE, "a")
    callers.tick()
    callers.heard(OTHER)
    callers.opens(OTHER, "a")
    assert ticks(callers, LOST_AFTER_TICKS - 1) == [(ONE, [])]
    assert callers.tick() == [(OTHER, ["a"])]
