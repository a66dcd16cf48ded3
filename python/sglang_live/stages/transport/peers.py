"""Peers of a stage, which are servers, and the sessions that each of them owns.

In: what was heard of each peer. Out: peers that are lost. Stages end with a server on their host;
from one on another host nothing comes any more, though servers ping their stages every two seconds
(stages/supervisor.py). Owner: one Peers per StageServer.

A session that goes on at another server has a higher epoch there (journal/). With the first job of
that epoch it is that server's, with all that the stage holds of it; the earlier owner, which may
still run, is refused from then on.
"""

import uuid
from collections import Counter
from dataclasses import dataclass

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


class StaleOwnerError(BadInputError):
    """The session has gone on at another server, or in a later epoch of this one."""

    code = "stale_session_owner"


@dataclass(frozen=True, slots=True)
class _Owner:
    run: bytes
    epoch: int


@dataclass(slots=True)
class _Left:
    """A session that was taken over and is closed. n_ticks: since then."""

    epoch: int
    n_ticks: int = 0


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
        self._owners: dict[str, _Owner] = {}
        self._n_sessions: Counter[bytes] = Counter()
        self._left: dict[str, _Left] = {}

    def heard(self, peer: bytes) -> None:
        self._silent_ticks[peer] = 0

    def opens(self, peer: bytes, session_id: str, epoch: int = 0) -> bool:
        """
        Args:
            epoch: 0: the session stays with the server that opened it.
        Returns:
            Whether the session is taken over: what others have open of it has to end.
        Raises:
            ForeignSessionError: another server has opened the session and not closed it.
            StaleOwnerError: the session is in a later epoch.
            CapacityError: this server has too many sessions.
        """
        if not session_id:
            return False
        run, owner, left = _run_of(peer), self._owners.get(session_id), self._left.get(session_id)
        latest = owner.epoch if owner else left.epoch if left else 0
        if epoch < latest:
            raise StaleOwnerError(f"the session is in epoch {latest}, not {epoch}")
        if owner and owner.run != run and epoch == latest:
            raise ForeignSessionError("the session is another peer's")
        if (owner is None or owner.run != run) and self._n_sessions[run] >= MAX_SESSIONS:
            raise CapacityError(f"{MAX_SESSIONS} sessions of one server are open")
        self._forget(session_id)
        self._left.pop(session_id, None)
        self._owners[session_id] = _Owner(run, epoch)
        self._n_sessions[run] += 1
        return owner is not None and epoch > owner.epoch

    def may_touch(self, peer: bytes, session_id: str) -> bool:
        """Whether the session belongs to the peer's server, or to none yet."""
        owner = self._owners.get(session_id)
        return owner is None or owner.run == _run_of(peer)

    def closes(self, session_id: str) -> None:
        owner = self._forget(session_id)
        if owner is not None and owner.epoch > 1:
            # Earlier owners may not have noticed. Their next job would open it anew.
            self._left[session_id] = _Left(owner.epoch)

    def tick(self) -> list[tuple[bytes, list[str]]]:
        """Remove and return the peers that are lost by now, with the sessions of each.

        Sessions of a run that has another connection stay.
        """
        for left in self._left.values():
            left.n_ticks += 1
        self._left = {s: one for s, one in self._left.items() if one.n_ticks < LOST_AFTER_TICKS}
        for peer in self._silent_ticks:
            self._silent_ticks[peer] += 1
        lost = [peer for peer, n in self._silent_ticks.items() if n >= LOST_AFTER_TICKS]
        for peer in lost:
            del self._silent_ticks[peer]
        return [(peer, self._closed_with(peer)) for peer in lost]

    def _forget(self, session_id: str) -> _Owner | None:
        owner = self._owners.pop(session_id, None)
        if owner is not None:
            self._n_sessions[owner.run] -= 1
            if not self._n_sessions[owner.run]:
                del self._n_sessions[owner.run]
        return owner

    def _closed_with(self, peer: bytes) -> list[str]:
        run = _run_of(peer)
        if any(_run_of(other) == run for other in self._silent_ticks):
            return []
        sessions = [s for s, owner in self._owners.items() if owner.run == run]
        for session_id in sessions:
            self.closes(session_id)
        return sessions
