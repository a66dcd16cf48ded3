"""Callers of a stage and the sessions that each of them owns.

A caller on the same host takes its stages along when it dies. One on another host only falls
silent: servers ping their stages every other second (stages/supervisor.py), so silence tells.
"""

import uuid
from collections import Counter

from sglang_live.errors import BadInputError, CapacityError

TICK_S = 3.0
# Silence is counted in ticks of the stage's own event loop, not by a clock: where the loop itself
# was late, what callers said meanwhile has not been read yet.
LOST_AFTER_TICKS = 5
# Of one server at one stage. Each is a conversation.
MAX_SESSIONS = 16_384
_RUN_BYTES = 32


class ForeignSessionError(BadInputError):
    """The session was opened by another server."""

    code = "foreign_session"


def new_run() -> str:
    """A name for one run of a server; random, so that no other peer can take it."""
    return uuid.uuid4().hex


def connection_name(run: str) -> bytes:
    """The ZMQ routing id of one connection of a server's run."""
    return f"{run}.{uuid.uuid4().hex}".encode()


def _run_of(peer: bytes) -> bytes:
    run, dot, _ = peer.partition(b".")
    return run if dot and len(run) == _RUN_BYTES else peer


class Peers:
    """Callers by their ZMQ routing id. A session belongs to a server's run, on any connection."""

    def __init__(self) -> None:
        self._silent_ticks: dict[bytes, int] = {}
        self._owners: dict[str, bytes] = {}
        self._n_sessions: Counter[bytes] = Counter()

    def heard(self, peer: bytes) -> None:
        self._silent_ticks[peer] = 0

    def opens(self, peer: bytes, session_id: str) -> None:
        """
        Raises:
            ForeignSessionError: another server has opened it and not closed it.
            CapacityError: this one has too many.
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
        """Whether the session is the caller's, or has no owner yet."""
        run = _run_of(peer)
        return self._owners.get(session_id, run) == run

    def closes(self, session_id: str) -> None:
        if (run := self._owners.pop(session_id, None)) is not None:
            self._n_sessions[run] -= 1
            if not self._n_sessions[run]:
                del self._n_sessions[run]

    def tick(self) -> list[tuple[bytes, list[str]]]:
        """Callers that are lost as of now, and the sessions of each; they are forgotten.

        Sessions of a run that has another connection stay.
        """
        for peer in self._silent_ticks:
            self._silent_ticks[peer] += 1
        lost = [c for c, n in self._silent_ticks.items() if n >= LOST_AFTER_TICKS]
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
