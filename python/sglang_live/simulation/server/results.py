"""What the engines of a simulated server tell it."""

from typing import Protocol

from sglang_live.simulation.engine.requests import Request


class _Server(Protocol):
    def tokens_came(self, reqs: list[Request]) -> None: ...

    def thinker_finished(self, req: Request) -> None: ...

    def frames_came(self, reqs: list[Request]) -> None: ...

    def talker_finished(self, req: Request) -> None: ...


class Tokens:
    """Of the thinkers."""

    def __init__(self, server: _Server):
        self._server = server

    def outputs(self, reqs: list[Request]) -> None:
        self._server.tokens_came(reqs)

    def finished(self, req: Request) -> None:
        self._server.thinker_finished(req)


class Frames:
    """Of the talkers."""

    def __init__(self, server: _Server):
        self._server = server

    def outputs(self, reqs: list[Request]) -> None:
        self._server.frames_came(reqs)

    def finished(self, req: Request) -> None:
        self._server.talker_finished(req)
