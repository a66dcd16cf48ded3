"""A simulated talker stage: its jobs, whose requests decode a frame for each step.

As stages/talker/stage.py: user messages that it lacks are requested, text feeds the request, and
playback is reported to the engine by the stage's own HeardFeed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from sglang_live.core import HistoryItem
from sglang_live.extensions.planner.simulation.engine.engine import Engine
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.server.link import SimulatedStage, Sizes, StageJob
from sglang_live.extensions.planner.simulation.server.turn_spec import TurnSpec
from sglang_live.ids import SPEAK_PREFIX
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import (
    AnyMessage,
    CodecFrames,
    Heard,
    HeardOfMany,
    Opener,
    SegmentsNeeded,
    TalkerDone,
    TalkerInput,
    TalkerRequest,
    TalkerSegments,
    WireSegment,
)
from sglang_live.stages.engine_link import HeardFeed
from sglang_live.stages.talker.response import MAX_FRAMES

# Prompt positions of the talker before its first frame (models/speech_lm/talker_ids.py).
PREFIX_TOKENS = 9
_CODES = b"\0\0"


class TalkerJob(StageJob):
    def __init__(self, stage: "SimulatedTalker", request: TalkerRequest):
        super().__init__(stage, request)
        self.request = request
        self.n_frames = request.n_frames
        self._talker = stage
        self._n_text: float = 0 if request.first_id is None else 1
        self._req: Request | None = None
        self._is_prepared = False
        stage.take_segments(request.session_id, request.segments)
        if missing := stage.missing(request):
            self.send(SegmentsNeeded(self.job_id, missing))
        stage.events.after(stage.prepare_s, self._prepared)

    def take(self, message: AnyMessage) -> None:
        match message:
            case TalkerInput():
                self._n_text = math.inf if message.done else self._n_text + len(message.ids)
                if self._req is not None:
                    self._talker.engine.post(self._text_came)
            case TalkerSegments():
                self._talker.take_segments(self.request.session_id, message.segments)
                self._begin()
            case Heard() if self._req is not None:
                self._talker.report(self._req.rid, message)

    def cancel(self) -> None:
        if self._req is not None:
            self._talker.abort(self._req)

    def frame_came(self) -> None:
        self.n_frames += 1
        if not self.is_over:
            self.send(CodecFrames(self.job_id, _CODES))

    def finished(self) -> None:
        if not self.is_over:
            self.end(TalkerDone(self.job_id, "stop", self.n_frames))

    def _prepared(self) -> None:
        self._is_prepared = True
        self._begin()

    def _begin(self) -> None:
        stage = self._talker
        if self.is_over or self._req is not None or not self._is_prepared:
            return
        if stage.is_dead or stage.missing(self.request):
            return
        self._req = stage.request_of(self)
        self._req.n_text = self._n_text
        req = self._req
        stage.engine.post(lambda: stage.engine.add(req))

    def _text_came(self) -> None:
        assert self._req is not None
        self._req.n_text = self._n_text


class SimulatedTalker(SimulatedStage):
    """
    Attributes:
        n_made: frames that it has made.
    """

    def __init__(
        self,
        name: str,
        events: Events,
        engine: Engine,
        drawn: Mapping[str, TurnSpec],
        *,
        to_engine_s: float,
        prepare_s: float,
        has_window: bool,
    ):
        super().__init__(name)
        self.events = events
        self.engine = engine
        self.prepare_s = prepare_s
        self.n_made = 0
        self._drawn = drawn
        self._to_engine_s = to_engine_s
        self._has_window = has_window
        self._feed = HeardFeed(self._send_heard, events)
        self._segments: dict[str, dict[str, int]] = defaultdict(dict)  # tokens, by session and key
        self._computed: dict[str, set[str]] = defaultdict(set)  # whose KV is in the radix tree

    def begin(self, opener: Opener) -> StageJob:
        assert isinstance(opener, TalkerRequest), "no other work is simulated"
        return TalkerJob(self, opener)

    def close_session(self, session_id: str) -> None:
        self._segments.pop(session_id, None)
        self._computed.pop(session_id, None)

    @property
    def held(self) -> dict[str, int]:
        own = {"segments": len(self._segments), "prompts": len(self._computed)}
        return {**super().held, **own, **self.engine.held}

    def die(self) -> None:
        super().die()
        self.engine.stop()

    def resume(
        self, session_id: str, items: Sequence[HistoryItem], sizes: Mapping[str, Sizes]
    ) -> None:
        users = {item.key: sizes[item.key].n_tokens for item in items if item.role == "user"}
        self._segments[session_id] = users
        self._computed[session_id] = {*users}

    # --- user messages ---

    def take_segments(self, session_id: str, segments: list[WireSegment]) -> None:
        self._segments[session_id] |= {one.key: len(one.token_ids) for one in segments}

    def missing(self, request: TalkerRequest) -> list[str]:
        known = self._segments[request.session_id]
        return [key for key in request.segment_keys if key not in known]

    def request_of(self, job: TalkerJob) -> Request:
        """The prompt is the user messages, those of them that the window keeps, and a prefix."""
        request = job.request
        session_id, keys = request.session_id, request.segment_keys
        known, computed = self._segments[session_id], self._computed[session_id]
        window = math.inf if request.window_frames is None else request.window_frames
        n_new = sum(known[key] for key in keys if key not in computed)
        n_all = int(min(sum(known[key] for key in keys), window))
        self._segments[session_id] = {key: known[key] for key in keys}
        self._computed[session_id] = {*keys}
        n_frames = self._drawn[session_id].n_frames
        bound = MAX_FRAMES
        if self._has_window and request.window_frames is not None:
            kept = RetentionConfig(
                window_tokens=request.window_frames, slack_tokens=request.slack_frames
            )
            bound = kept.most_frames(page_size=1)
        return Request(
            rid=f"{SPEAK_PREFIX}{job.job_id}",
            prompt_tokens=n_all + PREFIX_TOKENS + request.n_frames,
            cached_tokens=max(0, n_all - n_new),
            max_new=max(1, n_frames - request.n_frames) + 1,
            reserve=bound,
            owner=job,
        )

    # --- the engine ---

    def report(self, rid: str, news: Heard) -> None:
        if self.engine.rounds is not None:
            self.events.after(self._to_engine_s, partial(self._put, rid, news))

    def _put(self, rid: str, news: Heard) -> None:
        if not self.is_dead:
            self._feed.put(rid, news)

    def _send_heard(self, news: HeardOfMany) -> None:
        rounds = self.engine.rounds
        assert rounds is not None
        self.engine.post(lambda: rounds.progress(news))

    def abort(self, req: Request) -> None:
        def end() -> None:
            if not req.is_finished:
                self.engine.abort(req)

        self.events.after(self._to_engine_s, lambda: self.engine.post(end))

    def outputs(self, reqs: list[Request]) -> None:
        for req in reqs:
            if req.n_out > 1:  # the prefill completes no frame
                self.n_made += 1
                req.owner.frame_came()

    def finished(self, req: Request) -> None:
        self._feed.forget(req.rid)
        req.owner.finished()
