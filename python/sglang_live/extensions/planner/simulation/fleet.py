"""Several servers behind a load balancer.

The balancer is an operator's, not the server's: a new session gets the healthy server with the
fewest, and the next one if that refuses it. It stays there as long as its socket (docs/deploy.md).
"""

from collections.abc import Callable, Sequence

from sglang_live.errors import LiveError, StageUnavailableError
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.server.session import NEW, History, Session
from sglang_live.extensions.planner.simulation.server.turn import Listening, TurnSpec


class Fleet:
    """A Service (users.py)."""

    def __init__(self, servers: Sequence[Server], events: Events):
        self.servers = servers
        self.events = events
        self._server_of: dict[str, Server] = {}

    def open(self, session_id: str, history: History = NEW) -> Session:
        """Raises LiveError: no server has room."""
        refusal: LiveError = StageUnavailableError("no server is up", retry_after_s=10)
        up = [server for server in self.servers if server.is_up]
        for server in sorted(up, key=lambda one: len(one.sessions)):
            try:
                session = server.open(session_id, history)
            except LiveError as error:
                refusal = error
                continue
            self._server_of[session_id] = server
            return session
        raise refusal

    def close(self, session: Session) -> None:
        self._server_of[session.session_id].close(session)

    def take_turn(self, session: Session, spec: TurnSpec, changed: Callable[[], None]) -> Listening:
        return self._server_of[session.session_id].take_turn(session, spec, changed)

    def interrupt(self, session: Session) -> None:
        self._server_of[session.session_id].interrupt(session)

    def speech_started(self, session: Session) -> None:
        self._server_of[session.session_id].speech_started(session)
