"""A simulated thinker stage: its jobs, and the engine's end of its control channel.

Orders and answers of sessions go through the stage's own ThinkerFeed; what a session does with its
engine is in thinker_session.py.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from sglang_live.core import INPUT_RATE_HZ, HistoryItem, Role
from sglang_live.errors import ItemsMissingError, LiveError
from sglang_live.extensions.planner.simulation.engine.engine import Engine
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.server.link import SimulatedStage, Sizes, StageJob
from sglang_live.extensions.planner.simulation.server.thinker_session import (
    ThinkerKv,
    ThinkerSession,
    Thought,
    size_of_user,
)
from sglang_live.extensions.planner.simulation.server.turn_spec import TurnSpec
from sglang_live.extensions.planner.simulation.spec import HostTimes
from sglang_live.messages import (
    AnyMessage,
    Feed,
    Heard,
    HeardOfMany,
    Interrupt,
    MeasureKv,
    NextUseHint,
    Opener,
    Promote,
    Retained,
    RetainSession,
    SessionHint,
    SessionKv,
    TextTokens,
    ThinkerDone,
    ThinkerRequest,
    Truncated,
    TruncateSession,
    UserSegment,
    UserSpeaking,
    WireAudio,
    WireItem,
    WireText,
)
from sglang_live.stages.engine_link import FeedSocket
from sglang_live.stages.thinker.engine_control import ThinkerFeed
from sglang_live.stages.thinker.prefill_signs import show_prefill
from sglang_live.stages.transport.server import ServedJob

_WORD = " a"


class ThinkerJob(StageJob):
    """task: serves it."""

    def __init__(self, stage: "SimulatedThinker", request: ThinkerRequest):
        super().__init__(stage, request)
        self.request = request
        self.thought = Thought(request, self._said)
        self.segments: list[UserSegment] = []
        self._thinker = stage
        self.task = asyncio.create_task(stage.serve(self), name=request.job_id)

    def _said(self, token_id: int) -> None:
        for segment in self.segments:
            self.send(segment)
        self.segments = []
        self.send(TextTokens(self.job_id, [token_id], _WORD))

    def take(self, message: AnyMessage) -> None:
        self._thinker.events.after(self._thinker.to_engine_s, partial(self._act, message))

    def _act(self, message: AnyMessage) -> None:
        thought, feed = self.thought, self._thinker.feed
        generates = thought.generating is not None
        match message:
            case Heard() if feed is not None and generates:
                feed.heard.put(thought.rid, message)
            case Interrupt():
                thought.ending = True
                if feed is not None and generates:
                    feed.interrupt(thought.rid)
            case Promote():
                thought.prefill_only = False
                if feed is not None and thought.prefilling:
                    feed.promote(thought.prefilling)

    def cancel(self) -> None:
        self.task.cancel()


class SimulatedThinker(SimulatedStage):
    """
    Args:
        drawn: what the response of each session's turn will be, by session.
        kv: of all sessions; what they have in common.
    Attributes:
        feed: control channel of the engine. None without policies.
        to_engine_s: of an order, within the stage.
        answers_lost_until_s: until then the engine's answers to orders are lost.
    """

    def __init__(
        self,
        name: str,
        events: Events,
        engine: Engine,
        kv: ThinkerKv,
        host: HostTimes,
        drawn: Mapping[str, TurnSpec],
        *,
        to_engine_s: float,
        prepare_s: float,
        has_feed: bool,
    ):
        super().__init__(name)
        self.events = events
        self.engine = engine
        self.kv = kv
        self.host = host
        self.to_engine_s = to_engine_s
        self.answers_lost_until_s = 0.0
        self._prepare_s = prepare_s
        self._drawn = drawn
        self.feed = ThinkerFeed(cast(FeedSocket, self), events) if has_feed else None
        self.sessions: dict[str, ThinkerSession] = {}
        self._busy: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._items: dict[str, dict[str, tuple[HistoryItem, Sizes]]] = defaultdict(dict)
        self._live: dict[str, Request] = {}
        self._early: set[str] = set()  # requests that are to end when they come
        self._closing: set[asyncio.Task[None]] = set()

    # --- jobs ---

    def begin(self, opener: Opener) -> StageJob:
        assert isinstance(opener, ThinkerRequest), "no other work is simulated"
        return ThinkerJob(self, opener)

    async def serve(self, job: ThinkerJob) -> None:
        request = job.request
        session_id = request.session_id or f"once-{request.job_id}"
        try:
            await self.events.sleep(self._prepare_s)
            async with self._busy[session_id]:
                await self._think(job, session_id)
        except LiveError as error:
            job.fail(error)
        finally:
            if not request.session_id and not self.is_dead:
                await asyncio.shield(self._close(session_id))

    async def _think(self, job: ThinkerJob, session_id: str) -> None:
        request, thought = job.request, job.thought
        history, sizes = self._history(session_id, request)
        session = self.session(session_id)
        if request.preheat and not await session.needs_preheat(history, thought):
            return job.end(_done(job, []))
        spec = None if request.prefill_only else self._drawn[request.session_id]
        job.segments = session.segments(job.job_id, history, sizes)
        signs = asyncio.create_task(
            show_prefill(cast(ServedJob, job), self._prefill_tokens, lambda: bool(thought.ids))
        )
        try:
            await session.think(history, sizes, thought, spec)
        finally:
            signs.cancel()
        for segment in job.segments:
            job.send(segment)
        if not request.prefill_only:
            whole = HistoryItem(
                key=request.item_key, role="assistant", parts=(), token_ids=tuple(thought.ids)
            )
            self._items[session_id][request.item_key] = whole, Sizes(len(thought.ids))
        gone = [] if request.prefill_only else await session.drop_old(request)
        job.end(_done(job, gone))

    def _prefill_tokens(self) -> tuple[int, int]:
        """Tokens of prompts computed so far, and left to compute."""
        return self.engine.n_prefilled, sum(one.left_to_prefill for one in self.engine.waiting)

    def session(self, session_id: str) -> ThinkerSession:
        if session_id not in self.sessions:
            self.sessions[session_id] = ThinkerSession(session_id, self)
        return self.sessions[session_id]

    def _history(
        self, session_id: str, request: ThinkerRequest
    ) -> tuple[list[HistoryItem], dict[str, Sizes]]:
        known = self._items[session_id]
        for item in request.items:
            known[item.key] = _item(item, self.kv.stateless), _sizes(item)
        if missing := [key for key in request.keys if key not in known]:
            raise ItemsMissingError(f"{len(missing)} of {len(request.keys)} items unknown")
        known = self._items[session_id] = {key: known[key] for key in request.keys}
        return [item for item, _ in known.values()], {k: size for k, (_, size) in known.items()}

    def resume(
        self, session_id: str, items: Sequence[HistoryItem], sizes: Mapping[str, Sizes]
    ) -> None:
        self._items[session_id] = {item.key: (item, sizes[item.key]) for item in items}
        self.session(session_id).resume(items, sizes)

    def hint(self, hint: SessionHint) -> None:
        if self.feed is not None and hint.session_id in self.sessions:
            self.feed.hint(hint)

    def close_session(self, session_id: str) -> None:
        task = asyncio.create_task(self._close(session_id), name="session closing")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, session_id: str) -> None:
        async with self._busy[session_id]:
            self._items.pop(session_id, None)
            if (session := self.sessions.pop(session_id, None)) is not None:
                session.lose()
        self._busy.pop(session_id, None)

    @property
    def held(self) -> dict[str, int]:
        own = {
            "sessions": len(self.sessions),
            "histories": len(self._items),
            "locks": len(self._busy),
            "requests": len(self._live),
        }
        return {**super().held, **own, **self.engine.held}

    def die(self) -> None:
        super().die()
        self.engine.stop()
        for job in self.jobs.values():
            job.cancel()
        for task in self._closing:
            task.cancel()

    # --- results of the engine ---

    def outputs(self, reqs: list[Request]) -> None:
        for req in reqs:
            req.owner.came(req)

    def finished(self, req: Request) -> None:
        self._live.pop(req.rid, None)
        if self.feed is not None:
            self.feed.heard.forget(req.rid)
        req.owner.ended(req)

    # --- the engine's end of the control channel ---

    def send(self, feed: Feed) -> None:
        """As FeedSocket."""
        self.engine.post(partial(self._obey, feed))

    def _obey(self, feed: Feed) -> None:
        rounds = self.engine.rounds
        match feed:
            case HeardOfMany() if rounds is not None:
                rounds.progress(feed)
            case Interrupt(to=rid):
                self._interrupt(rid)
            case Promote(to=rid) if rid in self._live:
                if rounds is not None:
                    rounds.table.to_foreground(rid)
            case TruncateSession(session_id=name, n_tokens=n, ask_id=ask_id):
                self.sessions[name].truncated(n)
                self._answer(Truncated(name, n, ask_id))
            case MeasureKv(session_id=name, ask_id=ask_id):
                self._answer(SessionKv(name, self.sessions[name].n_held, ask_id))
            case RetainSession(session_id=name, ask_id=ask_id):
                n_tokens, n_dropped = self.sessions[name].compacted(feed)
                self._answer(Retained(name, n_tokens, feed.sink_tokens, n_dropped, ask_id))
            case UserSpeaking(session_id=name) if self.kv.tiers is not None:
                if feed.speaks and name in self.sessions:
                    self.kv.tiers.speech_started(self.sessions[name].held)
            case NextUseHint() if self.kv.tiers is not None:
                self.kv.tiers.expect(feed)

    def _interrupt(self, rid: str) -> None:
        req = self._live.get(rid)
        if req is None:
            self._early.add(rid)
        else:
            req.max_new = max(1, req.n_out)

    def add(self, req: Request) -> None:
        """Queue a request in the engine; within a message."""
        self._live[req.rid] = req
        if req.rid in self._early:
            self._early.discard(req.rid)
            self._obey(Interrupt(req.rid))
        self.engine.add(req)

    def abort(self, req: Request) -> None:
        """Have a request end without its result."""

        def end() -> None:
            if not req.is_finished:
                self.engine.abort(req)

        self.events.after(self.to_engine_s, lambda: self.engine.post(end))

    def _answer(self, report: Any) -> None:
        def arrive() -> None:
            assert self.feed is not None
            if not self.is_dead and self.events.now_s() >= self.answers_lost_until_s:
                self.feed.answered(report)

        self.events.after(self.host.answer_s, arrive)


def _done(job: ThinkerJob, gone: list[str]) -> ThinkerDone:
    thought = job.thought
    return ThinkerDone(
        job.job_id,
        finish="interrupted" if thought.ending else "stop",
        ids=thought.ids,
        text=_WORD * len(thought.ids),
        n_prompt=thought.n_prompt,
        n_audio=0,
        n_cached=thought.n_cached,
        rebuilt=thought.rebuilt,
        gone=gone,
    )


def _item(item: WireItem, stateless: bool) -> HistoryItem:
    ids = None if item.token_ids is None else tuple(item.token_ids)
    if stateless and item.role == "assistant" and ids is None:
        # Its text is that of the first tokens, and so are its tokens.
        ids = tuple(range(1, _sizes(item).n_tokens + 1))
    return HistoryItem(key=item.key, role=cast(Role, item.role), parts=(), token_ids=ids)


def _sizes(item: WireItem) -> Sizes:
    """A character of a user's text is a token."""
    if item.token_ids is not None:
        return Sizes(len(item.token_ids))
    audio_s, n_text = 0.0, 0
    for part in item.parts:
        if isinstance(part, WireAudio):
            audio_s += part.pcm.shape[0] / INPUT_RATE_HZ
        elif isinstance(part, WireText):
            n_text += len(part.text)
    if item.role == "assistant":
        return Sizes(n_text // len(_WORD))
    return size_of_user(audio_s, n_text)
