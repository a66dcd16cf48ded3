"""What the engines of a simulated server tell it."""

from typing import Protocol

from sglang_live.simulation.engine.requests import Request
from sglang_live.simulation.server.posts import Post


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
        for req in reqs:
            if isinstance(req.owner, Post):
                req.owner.came()
        self._server.tokens_came([req for req in reqs if not isinstance(req.owner, Post)])

    def finished(self, req: Request) -> None:
        if not isinstance(req.owner, Post):
            self._server.thinker_finished(req)


class Frames:
    """Of the talkers."""

    def __init__(self, server: _Server):
        self._server = server

    def outputs(self, reqs: list[Request]) -> None:
        self._server.frames_came(reqs)

    def finished(self, req: Request) -> None:
        self._server.talker_finished(req)
