"""Who calls a stage, and whose sessions live in it: one that went away must leave nothing there.

A caller on the same host takes its stages along when it dies. One on another host only falls
silent: servers ping their stages every other second (stages/supervisor.py), so silence tells.
"""

TICK_S = 3.0
# Silence is counted in ticks of the stage's own event loop, not by a clock: where the loop itself
# was late, what callers said meanwhile has not been read yet.
LOST_AFTER_TICKS = 5


class Callers:
    """Callers by their ZMQ routing id."""

    def __init__(self) -> None:
        self._silent_ticks: dict[bytes, int] = {}
        self._owners: dict[str, bytes] = {}

    def heard(self, caller: bytes) -> None:
        self._silent_ticks[caller] = 0

    def opens(self, caller: bytes, session_id: str) -> None:
        """The latest caller owns a session: a server that came back calls with a new id."""
        if session_id:
            self._owners[session_id] = caller

    def may_touch(self, caller: bytes, session_id: str) -> bool:
        """Whether the session is the caller's, or has no owner yet."""
        return self._owners.get(session_id, caller) == caller

    def closes(self, session_id: str) -> None:
        self._owners.pop(session_id, None)

    def tick(self) -> list[tuple[bytes, list[str]]]:
        """Callers that are lost as of now, and the sessions of each; they are forgotten."""
        lost = []
        for caller in list(self._silent_ticks):
            self._silent_ticks[caller] += 1
            if self._silent_ticks[caller] >= LOST_AFTER_TICKS:
                del self._silent_ticks[caller]
                sessions = [s for s, owner in self._owners.items() if owner == caller]
                for session_id in sessions:
                    del self._owners[session_id]
                lost.append((caller, sessions))
        return lost
