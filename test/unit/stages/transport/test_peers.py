"""Who is lost to a stage, and what it leaves there."""

import pytest

from sglang_live.errors import CapacityError
from sglang_live.stages.transport import peers as callers_module
from sglang_live.stages.transport.peers import (
    LOST_AFTER_TICKS,
    Callers,
    ForeignSessionError,
    connection_name,
    new_run,
)

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


def test_a_session_outlives_the_connection_of_the_server_that_opened_it():
    callers, run = Callers(), new_run()
    first, second = connection_name(run), connection_name(run)
    callers.heard(first)
    callers.opens(first, "a")
    callers.tick()
    callers.heard(second)
    callers.opens(second, "a")
    assert ticks(callers, LOST_AFTER_TICKS - 1) == [(first, [])]
    assert callers.tick() == [(second, ["a"])]


def test_a_session_stays_with_the_server_that_opened_it_first():
    callers = Callers()
    for one, other in ((ONE, OTHER), (connection_name(new_run()), connection_name(new_run()))):
        session_id = f"of {one!r}"
        callers.opens(one, session_id)
        with pytest.raises(ForeignSessionError):
            callers.opens(other, session_id)
        assert callers.may_touch(one, session_id) and not callers.may_touch(other, session_id)
        callers.closes(session_id)
        callers.opens(other, session_id)
        assert not callers.may_touch(one, session_id)


def test_a_lost_servers_sessions_can_be_opened_by_another():
    callers = Callers()
    callers.heard(ONE)
    callers.opens(ONE, "a")
    ticks(callers)
    callers.opens(OTHER, "a")


def test_one_server_can_own_only_so_many_sessions(monkeypatch):
    monkeypatch.setattr(callers_module, "MAX_SESSIONS", 2)
    callers = Callers()
    for session_id in ("a", "b", "b", "a"):
        callers.opens(ONE, session_id)
    with pytest.raises(CapacityError):
        callers.opens(ONE, "c")
    callers.opens(OTHER, "c")
    callers.closes("a")
    callers.opens(ONE, "d")
