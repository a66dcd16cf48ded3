"""Peers of a stage, which are servers, and the sessions that each of them owns.

In: what was heard of each peer. Out: peers that are lost. Stages end with a server on their host;
from one on another host nothing comes any more, though servers ping their stages every two seconds
(stages/supervisor.py). Owner: one Peers per StageServer.
"""

import uuid
from collections import Counter

from sglang_live.errors import BadInputError, CapacityError

TICK_S = 3.0
# Silence is counted in ticks of the stage's event loop, not by a clock: while the loop is late,
# messages of its peers wait unread.
LOST_AFTER_TICKS = 5
# Sessions of one server at one stage.
MAX_SESSIONS = 16_384
_RUN_BYTES = 32


class ForeignSessionError(BadInputError):
    """The session was opened by another server."""

    code = "foreign_session"


def new_run() -> str:
    """A name for one run of a server. Random, so that no other peer can choose it."""
    return uuid.uuid4().hex


def connection_name(run: str) -> bytes:
    """The ZMQ routing id of one connection of a server's run."""
    return f"{run}.{uuid.uuid4().hex}".encode()


def _run_of(peer: bytes) -> bytes:
    run, dot, _ = peer.partition(b".")
    return run if dot and len(run) == _RUN_BYTES else peer


class Peers:
    """Peers by their ZMQ routing id. A session belongs to a server's run, on any connection."""

    def __init__(self) -> None:
        self._silent_ticks: dict[bytes, int] = {}
        self._owners: dict[str, bytes] = {}
        self._n_sessions: Counter[bytes] = Counter()

    def heard(self, peer: bytes) -> None:
        self._silent_ticks[peer] = 0

    def opens(self, peer: bytes, session_id: str) -> None:
        """
        Raises:
            ForeignSessionError: another server has opened the session and not closed it.
            CapacityError: this server has too many sessions.
        """
        if not session_id:
            return
        run = _run_of(peer)
        owner = self._owners.get(session_id)
        if owner is None:
            if self._n_sessions[run] >= MAX_SESSIONS:
                raise CapacityError(f"{MAX_SESSIONS} sessions of one server are open")
            self._owners[session_id] = run
            self._n_sessions[run] += 1
        elif owner != run:
            raise ForeignSessionError("the session is another peer's")

    def may_touch(self, peer: bytes, session_id: str) -> bool:
        """Whether the session belongs to the peer's server, or to none yet."""
        run = _run_of(peer)
        return self._owners.get(session_id, run) == run

    def closes(self, session_id: str) -> None:
        if (run := self._owners.pop(session_id, None)) is not None:
            self._n_sessions[run] -= 1
            if not self._n_sessions[run]:
                del self._n_sessions[run]

    def tick(self) -> list[tuple[bytes, list[str]]]:
        """Remove and return the peers that are lost by now, with the sessions of each.

        Sessions of a run that has another connection stay.
        """
        for peer in self._silent_ticks:
            self._silent_ticks[peer] += 1
        lost = [peer for peer, n in self._silent_ticks.items() if n >= LOST_AFTER_TICKS]
        for peer in lost:
            del self._silent_ticks[peer]
        return [(peer, self._closed_with(peer)) for peer in lost]

    def _closed_with(self, peer: bytes) -> list[str]:
        run = _run_of(peer)
        if any(_run_of(other) == run for other in self._silent_ticks):
            return []
        sessions = [s for s, owner in self._owners.items() if owner == run]
        for session_id in sessions:
            self.closes(session_id)
        return sessions
