"""The talker stage. One request of its engine speaks one response, and gets text as it comes."""

import asyncio
import logging
import os
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_live import ids
from sglang_live.aio import result_with, vital
from sglang_live.clock import MonotonicClock
from sglang_live.engine_channel.inbox import INBOX_ENV, OUTBOX_ENV, STEPS_ENV, steps_text
from sglang_live.errors import ItemsMissingError, StageFailedError
from sglang_live.ids import FLEX_PREFIX, SPEAK_PREFIX, WARM_UP
from sglang_live.messages import (
    AnyMessage,
    CodecFrames,
    ForgetStates,
    Frames,
    Heard,
    MakeVoice,
    PolicyReport,
    SegmentsNeeded,
    StreamEvents,
    TalkerDone,
    TalkerForget,
    TalkerInput,
    TalkerPrompt,
    TalkerRequest,
    TalkerSegments,
    TalkerText,
    WireSegment,
)
from sglang_live.models.duplex_talker import DuplexTalker
from sglang_live.models.family import SpeakerReader, TalkerModel, family_at, part
from sglang_live.models.piece_talker import PieceTalker
from sglang_live.stages.engine_host import EXTERNAL_MODELS_ENV, EngineHost
from sglang_live.stages.engine_link import (
    FeedSocket,
    HeardFeed,
    PolicyTotals,
    Reports,
    StreamEventRoutes,
)
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.talker.response import MAX_FRAMES, FrameQueue, SpeechBound, SpokenIds
from sglang_live.stages.talker.segments import Segments, first_kept, n_left_out
from sglang_live.stages.talker.voice_making import VoiceMaking
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.server import ServedJob

log = logging.getLogger(__name__)

MAX_RUNNING = 32


@dataclass(frozen=True, slots=True)
class _Begun:
    """The first ids of a text, none of a text of which nothing is said."""

    ids: list[int]
    is_complete: bool


def load_talker(spec: StageSpec) -> TalkerModel | PieceTalker | DuplexTalker:
    name = family_at(spec.family).talker
    assert name is not None, "a model without a talker has no such stage"
    given = {"voices": Path(spec.voices)} if spec.voices else {}
    talker: TalkerModel | PieceTalker | DuplexTalker = part(name)(Path(spec.model_path), **given)
    return talker


class TalkerStage:
    def __init__(self, spec: StageSpec, model: TalkerModel):
        inbox, outbox = spec.socket_path("inbox"), spec.socket_path("outbox")
        self.model = model
        os.environ |= {
            INBOX_ENV: inbox,
            OUTBOX_ENV: outbox,
            STEPS_ENV: steps_text(self.model.step_s, self.model.chunk_steps),
            EXTERNAL_MODELS_ENV: self.model.external_models,
        }
        args = dict(spec.engine_args)
        n_running = args.setdefault("max_running_requests", MAX_RUNNING)
        self.host = EngineHost(
            spec,
            {
                "skip_tokenizer_init": True,
                **self.model.engine_args(Path(spec.cache_dir), n_running + 2, MAX_FRAMES),
                **args,
            },
        )
        self.engine = self.host.engine
        self._outbox = outbox
        self._feed = FeedSocket(inbox)
        self._segments = Segments(self.model, self._feed.send)
        self._frames: dict[str, FrameQueue] = {}
        self._heard = HeardFeed(self._feed.send, MonotonicClock()) if spec.policies else None
        self._bounds = spec.policies.retention
        self._totals = PolicyTotals()
        self._n_frames = 0
        self._n_dropped = 0
        self._n_left_out = self._n_begun_anew = self._n_unspeakable = 0
        self._stream_events = StreamEventRoutes()
        self._voices = VoiceMaking(model)
        self._warm_up_rid = ids.new_rid(SPEAK_PREFIX, WARM_UP)

    async def start(self) -> None:
        self._reader = vital(self._read_reports(), "read reports")
        await self._warm_up()
        await self.host.freeze()
        self.host.watch_over()

    async def _warm_up(self) -> None:
        """Speak a few frames: the first request loads what is loaded lazily."""
        prompt, rid = self.model.warm_up_prompt, self._warm_up_rid
        self._feed.send(TalkerPrompt(rid, prompt_len=len(prompt), seed=0, greedy=False))
        self._feed.send(TalkerText(rid, [self.model.text_end_id], done=True))
        sampling = {"max_new_tokens": 4, "temperature": 0.0}
        await self.host.run(rid, input_ids=prompt, sampling_params=sampling)
        self._feed.send(TalkerForget(rid))

    async def run(self, job: ServedJob) -> None:
        request = job.opener
        if isinstance(request, MakeVoice):
            return await self._voices.run(job, request)
        assert isinstance(request, TalkerRequest)
        # The messages of a stateless job are its own.
        session = request.session_id or job.job_id
        text = SpokenIds(self.model.reads) if self.model.reads else None
        try:
            early = await self._receive_segments(job, request, session)
            begun = await self._begin_text(job, request, text, early)
            if not begun.ids:
                await job.send(TalkerDone(job.job_id, finish="stop", n_frames=0))
                return
            rid, prompt = self._announce(request, session, begun.ids[0])
        finally:
            if not request.session_id:
                self._segments.close(session)
        bound = SpeechBound(MAX_FRAMES)
        frames = self._frames[rid] = FrameQueue(request.n_frames, bound)
        self._stream_events.add(rid, job)
        feeding = asyncio.create_task(self._receive(job, early, rid, bound, text))
        sending = asyncio.create_task(self._send_frames(job, frames))
        try:
            self._pass_text(rid, bound, begun.ids[1:], begun.is_complete)
            generating = self._generate(rid, prompt, bound)
            last = await result_with(generating, feeding, sending)
            # Token n completes frame n-1; the end token, or the last one allowed, has none. The
            # engine's own count lacks the frames whose KV a long response has dropped.
            await frames.expect(len(last["output_ids"]) - 1)
            await sending
        finally:
            for task in (feeding, sending):
                task.cancel()
            await asyncio.gather(feeding, sending, return_exceptions=True)
            self._frames.pop(rid, None)
            self._stream_events.remove(rid)
            if self._heard is not None:
                self._heard.forget(rid)
            self._feed.send(TalkerForget(rid))
        # Without a reason it was aborted here, by its bound.
        reason = last["meta_info"]["finish_reason"]
        finish = "length" if reason is None else reason["type"]
        if finish == "length":
            self._n_dropped += 1
            log.warning("speech_truncated job=%s n_frames=%d", job.job_id, frames.n_sent)
        await job.send(TalkerDone(job.job_id, finish, frames.n_sent, n_read=bound.n_read))

    async def _generate(self, rid: str, prompt: list[int], bound: SpeechBound) -> dict:
        # The model samples by itself, with the response's seed; at temperature 0 SGLang takes its
        # choice. Behind a long prompt there is less room; without any, the engine refuses.
        room = max(1, self.host.context_tokens - len(prompt) - 1)
        sampling = {"max_new_tokens": min(MAX_FRAMES, room), "temperature": 0.0}
        last: dict = {}
        stream = self.host.stream(rid, input_ids=prompt, sampling_params=sampling)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                last = chunk
                if len(chunk["output_ids"]) > bound.max_frames:
                    break
        return last

    async def close_session(self, session_id: str) -> None:
        self._segments.close(session_id)

    def load(self) -> dict[str, float]:
        own = {
            "sessions": float(self._segments.n_sessions),
            "replies": float(len(self._frames)),
            "frames": float(self._n_frames),
            "speech_truncated": float(self._n_dropped),
            "segments_left_out": float(self._n_left_out),
            "prompts_begun_anew": float(self._n_begun_anew),
            "segments_requested": float(self._segments.n_requested),
            "states_bytes": float(self._segments.n_bytes),
            "unspeakable": float(self._n_unspeakable),
        }
        return {**self.host.load(), **self._totals.load(), **own}

    async def _receive_segments(
        self, job: ServedJob, request: TalkerRequest, session: str
    ) -> list[AnyMessage]:
        """Take the request's user messages, and request those that are missing.

        Returns:
            Messages that came before them.
        """
        self._add(session, request.segments, job.frames)
        self._segments.keep_only(session, request.segment_keys)
        early: list[AnyMessage] = []
        if missing := self._segments.missing(session, request.segment_keys):
            log.info("segments_requested job=%s n=%d", job.job_id, len(missing))
            await job.send(SegmentsNeeded(job.job_id, missing))
            async with aclosing(job.inputs()) as messages:
                async for message in messages:
                    if isinstance(message, TalkerSegments):
                        self._add(session, message.segments, job.frames)
                        break
                    early.append(message)
        if missing := self._segments.missing(session, request.segment_keys):
            raise ItemsMissingError(f"{len(missing)} user messages unknown")
        return early

    async def _begin_text(
        self,
        job: ServedJob,
        request: TalkerRequest,
        text: SpokenIds | None,
        early: list[AnyMessage],
    ) -> "_Begun":
        """The ids with which the text begins. Other messages that come before them join `early`."""
        if text is None:
            assert request.first_id is not None, "it reads tokens"
            return _Begun([request.first_id], False)
        async with aclosing(job.inputs()) as messages:
            async for message in messages:
                if not isinstance(message, TalkerInput):
                    early.append(message)
                    continue
                ids = self._read_text(message, text)
                if ids or message.done:
                    return _Begun(ids, message.done)
        return _Begun([], True)

    def _add(self, session: str, segments: list[WireSegment], frames: list[bytes]) -> None:
        for segment in segments:
            states = None if segment.states is None else wire.take(segment.states, frames)
            key, ids = segment.key, segment.token_ids
            self._segments.add(session, key, ids, states, segment.pictures)

    def _announce(
        self, request: TalkerRequest, session: str, first_id: int
    ) -> tuple[str, list[int]]:
        """Announce the request to the scheduler. Returns its id and its prompt."""
        speaker_at: list[int] = []
        if request.speaker:
            assert isinstance(self.model, SpeakerReader), "it made the voice"
            speaker = np.frombuffer(request.speaker, "<f4")[None]
            prefix, place = self.model.response_in(speaker, first_id)
            speaker_at = [place]
        else:
            prefix = self.model.response(request.voice, first_id)
        keys = self._read(request, session, len(prefix))
        prompt = self._segments.prompt(session, keys)
        ids_of_prompt = prompt.ids + prefix
        lent = [self._segments.lend(speaker)] if speaker_at else []
        prefix_of_rid = FLEX_PREFIX if request.flex else SPEAK_PREFIX
        rid = ids.new_rid(prefix_of_rid, request.job_id)
        self._feed.send(
            TalkerPrompt(
                rid,
                prompt_len=len(ids_of_prompt),
                seed=request.seed,
                greedy=request.temperature == 0,
                temperature=request.temperature or self.model.temperature,
                penalty=self.model.repetition_penalty,
                audio_at=prompt.states_at + [len(prompt.ids) + place for place in speaker_at],
                states=prompt.states + lent,
                window_frames=(request.window_frames or 0) if self._bounds else 0,
                slack_frames=request.slack_frames,
                codes=request.codes,
                n_frames=request.n_frames,
                pictures=prompt.pictures,
            )
        )
        if lent:
            self._feed.send(ForgetStates(lent))  # the request has its own
        self._segments.make_room()
        return rid, ids_of_prompt

    def _read(self, request: TalkerRequest, session: str, prefix_tokens: int) -> list[str]:
        """The user messages that the response's prompt contains."""
        keys, began_with = request.segment_keys, self._segments.began_with.get(session)
        lengths = self._segments.lengths(session, keys)
        most_tokens = self.engine.tokenizer_manager.max_req_input_len
        unread = n_left_out(lengths, prefix_tokens, most_tokens)
        if unread:
            self._n_left_out += unread
            log.warning("segments_left_out job=%s n=%d of=%d", request.job_id, unread, len(lengths))
        if request.window_frames is not None:
            unread = max(unread, first_kept(keys, lengths, began_with))
        read = keys[unread:]
        if read and session == request.session_id:
            self._n_begun_anew += began_with not in (None, read[0])
            self._segments.began_with[session] = read[0]
        return read

    async def _receive(
        self,
        job: ServedJob,
        early: list[AnyMessage],
        rid: str,
        bound: SpeechBound,
        text: SpokenIds | None,
    ) -> None:
        """Pass text and playback from the orchestrator on to the scheduler."""
        for message in early:
            self._pass_on(message, rid, bound, text)
        async for message in job.inputs():
            self._pass_on(message, rid, bound, text)

    def _pass_on(
        self, message: AnyMessage, rid: str, bound: SpeechBound, text: SpokenIds | None
    ) -> None:
        if isinstance(message, Heard) and self._heard is not None:
            self._heard.put(rid, message)
        if isinstance(message, TalkerInput):
            ids = message.ids if text is None else self._read_text(message, text)
            self._pass_text(rid, bound, ids, message.done)

    def _read_text(self, message: TalkerInput, text: SpokenIds) -> list[int]:
        before = text.n_unspeakable
        ids = text.add(message)
        self._n_unspeakable += text.n_unspeakable - before
        return ids

    def _pass_text(self, rid: str, bound: SpeechBound, ids: list[int], is_complete: bool) -> None:
        if is_complete:
            ids = [*ids, self.model.text_end_id]
        if not ids:
            return
        bound.n_ids += len(ids)
        bound.is_complete = is_complete
        if bound.n_ids > MAX_FRAMES:
            raise StageFailedError(f"the response is longer than {MAX_FRAMES} tokens")
        self._feed.send(TalkerText(rid, ids, is_complete))

    async def _send_frames(self, job: ServedJob, frames: FrameQueue) -> None:
        while ready := await frames.next():
            codes = np.asarray(ready, dtype="<i2").tobytes()
            await job.send(CodecFrames(job.job_id, codes, len(ready)))

    async def _read_reports(self) -> None:
        async for report in Reports(self._outbox):
            if isinstance(report, Frames):
                self._take_frames(report)
            elif isinstance(report, StreamEvents):
                self._stream_events.pass_on(report)
            elif isinstance(report, PolicyReport):
                self._totals.take(report)

    def _take_frames(self, report: Frames) -> None:
        for rid, index, codes in zip(report.rids, report.index, report.codes, strict=True):
            # Also the frames of cancelled jobs.
            self._n_frames += rid != self._warm_up_rid
            if (queue := self._frames.get(rid)) is not None:
                queue.put(index, codes)
