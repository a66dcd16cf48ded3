"""Who is lost to a stage, and what it leaves there."""

import pytest

from sglang_live.errors import CapacityError
from sglang_live.stages.transport import peers as peers_module
from sglang_live.stages.transport.peers import (
    LOST_AFTER_TICKS,
    ForeignSessionError,
    Peers,
    connection_name,
    new_run,
)

ONE, OTHER = b"one", b"other"


def ticks(peers: Peers, n: int = LOST_AFTER_TICKS) -> list:
    return [lost for _ in range(n) for lost in peers.tick()]


def test_a_peer_that_is_heard_between_ticks_is_never_lost():
    peers = Peers()
    for _ in range(3 * LOST_AFTER_TICKS):
        peers.heard(ONE)
        assert peers.tick() == []


def test_a_silent_peer_is_lost_once_with_the_sessions_it_did_not_close():
    peers = Peers()
    peers.heard(ONE)
    for session_id in ("a", "b", ""):
        peers.opens(ONE, session_id)
    peers.closes("a")
    assert ticks(peers, LOST_AFTER_TICKS - 1) == []
    assert peers.tick() == [(ONE, ["b"])]
    assert ticks(peers) == []


def test_a_session_outlives_the_connection_of_the_server_that_opened_it():
    peers, run = Peers(), new_run()
    first, second = connection_name(run), connection_name(run)
    peers.heard(first)
    peers.opens(first, "a")
    peers.tick()
    peers.heard(second)
    peers.opens(second, "a")
    assert ticks(peers, LOST_AFTER_TICKS - 1) == [(first, [])]
    assert peers.tick() == [(second, ["a"])]


def test_a_session_stays_with_the_server_that_opened_it_first():
    peers = Peers()
    for one, other in ((ONE, OTHER), (connection_name(new_run()), connection_name(new_run()))):
        session_id = f"of {one!r}"
        peers.opens(one, session_id)
        with pytest.raises(ForeignSessionError):
            peers.opens(other, session_id)
        assert peers.may_touch(one, session_id) and not peers.may_touch(other, session_id)
        peers.closes(session_id)
        peers.opens(other, session_id)
        assert not peers.may_touch(one, session_id)


def test_a_lost_servers_sessions_can_be_opened_by_another():
    peers = Peers()
    peers.heard(ONE)
    peers.opens(ONE, "a")
    ticks(peers)
    peers.opens(OTHER, "a")


def test_one_server_can_own_a_limited_number_of_sessions(monkeypatch):
    monkeypatch.setattr(peers_module, "MAX_SESSIONS", 2)
    peers = Peers()
    for session_id in ("a", "b", "b", "a"):
        peers.opens(ONE, session_id)
    with pytest.raises(CapacityError):
        peers.opens(ONE, "c")
    peers.opens(OTHER, "c")
    peers.closes("a")
    peers.opens(ONE, "d")
