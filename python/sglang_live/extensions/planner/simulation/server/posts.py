"""Messages that are one item of a new session, and answered in text: no one listens to them. And
what the engines of a simulated server tell it, which tells such answers from those of turns."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.server.replicas import Replicas
from sglang_live.extensions.planner.simulation.server.session import Session
from sglang_live.extensions.planner.simulation.server.sessions import prompt_of_post
from sglang_live.extensions.planner.simulation.server.thinking import Thinking
from sglang_live.extensions.planner.simulation.spec import HostTimes
from sglang_live.interaction.user_stats import UserPrior, UserStats
from sglang_live.orchestrator.replica_choice import least_loaded


@dataclass(frozen=True, slots=True)
class Post:
    """came: called with each token of the answer."""

    came: Callable[[], None]


class Posts:
    def __init__(self, events: Events, host: HostTimes, replicas: Replicas):
        self._events = events
        self._host = host
        self._replicas = replicas
        self._numbers = itertools.count(1)

    def send(self, audio_s: float, n_tokens: int, came: Callable[[], None]) -> None:
        """Send a message whose answer has n_tokens; its session ends with it."""
        thinker = least_loaded("thinker", self._replicas.thinkers)
        prompt, header = prompt_of_post(audio_s), thinker.kv.header
        request = Request(
            rid=f"text-{next(self._numbers)}",
            prompt_tokens=header + prompt.n_new,
            cached_tokens=header,
            max_new=n_tokens,
            reserve=n_tokens,
            audio_s=audio_s,
            owner=Post(lambda: self._events.after(self._host.text_s, came)),
            managed=False,
        )
        thinking = Thinking(
            events=self._events,
            engine=thinker.engine,
            host=self._host,
            header=header,
            session=Session(request.rid, UserStats(UserPrior())),
            prompt=prompt,
            request=request,
        )
        self._events.after(self._host.to_thinker_s, thinking.begin)


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
