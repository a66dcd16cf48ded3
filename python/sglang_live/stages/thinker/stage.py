"""The thinker stage: a model that SGLang runs, in streaming sessions."""

import asyncio
import os
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np

from sglang_live.aio import result_with, vital
from sglang_live.bridge.platform import cpu
from sglang_live.clock import MonotonicClock
from sglang_live.core import INPUT_RATE_HZ, AudioPart, HistoryItem, TextPart
from sglang_live.engine_channel.inbox import (
    INBOX_ENV,
    OUTBOX_ENV,
    RADIX_BACKEND,
    STEPS_ENV,
    steps_text,
)
from sglang_live.errors import DeadlineError, ItemsMissingError
from sglang_live.ids import WARM_UP
from sglang_live.messages import (
    PROMPT_TOKENS_MOST,
    Heard,
    HiddenRows,
    Interrupt,
    MeasurePrompt,
    NativeRetained,
    Picture,
    PolicyReport,
    Promote,
    Retained,
    RetainNative,
    RetainSession,
    ScriptRequest,
    SessionHint,
    SessionKv,
    StreamEvents,
    ThinkerDone,
    ThinkerRequest,
    Truncated,
    UserSegment,
    WireSegment,
)
from sglang_live.models.family import ThinkerModel, family_at, part
from sglang_live.models.own_voice import SpokenIds
from sglang_live.models.prompt import Opening, TalkerReadPrompt
from sglang_live.models.stand_ins import call_instead, words_to_say
from sglang_live.models.tool_prompt import ResponseParts
from sglang_live.stages.engine_host import EXTERNAL_MODELS_ENV, EngineHost
from sglang_live.stages.engine_link import FeedSocket, PolicyTotals, Reports, StreamEventRoutes
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.thinker.audio_states import AudioStates
from sglang_live.stages.thinker.choice import shares_of, tokens_of
from sglang_live.stages.thinker.engine_control import ThinkerFeed
from sglang_live.stages.thinker.given_text import recite, transcribe
from sglang_live.stages.thinker.hearing import Hearing, IdHearing
from sglang_live.stages.thinker.items import Packing, formed, history_item
from sglang_live.stages.thinker.output import ResponseOutput
from sglang_live.stages.thinker.prefill_signs import show_prefill
from sglang_live.stages.thinker.preheat import Preheats
from sglang_live.stages.thinker.prompt_sizes import PromptSizes
from sglang_live.stages.thinker.request import retention_of, sampling_of
from sglang_live.stages.thinker.session import (
    Generated,
    Prefilled,
    Started,
    ThinkerSession,
    TurnState,
)
from sglang_live.stages.transport.server import ServedJob

# On a CPU, for any language model: KV of a small one takes 46 kB a token in float32.
_CPU_POOL_TOKENS = 16_384
_CPU_ARGS = {"mm_attention_backend": "sdpa", "image_processor_backend": "pil"}


class ThinkerStage:
    def __init__(self, spec: StageSpec):
        inbox, outbox = spec.socket_path("inbox"), spec.socket_path("outbox")
        os.environ[OUTBOX_ENV] = outbox
        if spec.policies:
            os.environ[INBOX_ENV] = inbox
        self.spec = spec
        self._bounds = spec.policies.retention
        own_cache = self._bounds or spec.policies.next_use
        family, path = family_at(spec.family), Path(spec.model_path)
        assert family.thinker is not None, "a model that only speaks has no such stage"
        self.model: ThinkerModel = part(family.thinker)(path)
        self._hearing = Hearing(part(family.recogniser)(path)) if family.recogniser else None
        ears, voice = self.model.ears, self.model.voice
        if ears is not None:
            ears.move("cpu" if cpu.is_active() else spec.device)
        self._ears = None if ears is None else IdHearing(ears)
        if voice is not None:
            os.environ[STEPS_ENV] = steps_text(voice.frame_s, voice.chunk_steps)
        os.environ[EXTERNAL_MODELS_ENV] = self.model.external_models
        small_pool = cpu.is_active() and (self._hearing or self._ears) is not None
        self.host = EngineHost(
            spec,
            {
                "model_path": spec.model_path,
                "served_model_name": spec.served_name,
                "enable_streaming_session": True,
                **self.model.engine_args(Path(spec.cache_dir)),
                **(_CPU_ARGS if cpu.is_active() else {}),
                **({"max_total_tokens": _CPU_POOL_TOKENS} if small_pool else {}),
                **({"radix_cache_backend": RADIX_BACKEND} if own_cache else {}),
                **spec.engine_args,
                # SGLang calls its own HTTP API once, after warming up.
                "host": "127.0.0.1",
            },
        )
        self.engine = self.host.engine
        tokenizer = self.engine.tokenizer_manager.tokenizer
        self.prompt = self.model.prompt(tokenizer)
        # What a talker reads of user messages. None: there is no talker.
        self._talker_reads = self.prompt if isinstance(self.prompt, TalkerReadPrompt) else None
        self._sizes = PromptSizes(self.prompt, tokenizer)
        self._sessions: dict[str, ThinkerSession] = {}
        self._busy: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._items: dict[str, dict[str, HistoryItem]] = defaultdict(dict)
        self._outbox = outbox
        self._states = AudioStates()
        self._totals = PolicyTotals()
        self._stream_events = StreamEventRoutes()
        self._feed = ThinkerFeed(FeedSocket(inbox), MonotonicClock()) if spec.policies else None
        if (feed := self._feed) is not None:
            self.host.owes = lambda: feed.awaits_answer
        names = ("sessions_rebuilt", "sessions_truncated", "truncations_refused")
        self._counts = dict.fromkeys(names, 0.0)
        self._preheats = Preheats()
        self._packing = Packing(self._items)

    async def start(self) -> None:
        self._reader = vital(self._read_reports(), "read reports")
        await self._warm_up()
        await self.host.freeze()
        self.host.watch_over()
        if self.spec.native_key:
            await self.host.serve_http(self.spec.native_socket, self.spec.native_key)

    async def _warm_up(self) -> None:
        """Respond to one second of silence: the first request loads what is loaded lazily."""
        silence = AudioPart(np.zeros(INPUT_RATE_HZ, np.int16))
        item = HistoryItem(key="warm-up", role="user", parts=(silence,))
        if self._hearing is not None:
            heard = await self._hearing.as_text(item)
            item = replace(heard, parts=(*heard.parts, TextPart("Hello.")))
        elif self._ears is not None:
            item = await self._ears.as_ids(item, self.prompt)
        session = ThinkerSession(self.host, self.prompt, WARM_UP)
        turn = session.think(
            instructions="",
            history=[item],
            item_key="warm-up response",
            sampling={"max_new_tokens": 4},
            state=TurnState(),
        )
        async for _ in turn:
            pass
        await session.close()

    async def run(self, job: ServedJob) -> None:
        if isinstance(job.opener, RetainNative):
            return await self._bound_native(job, job.opener)
        if isinstance(job.opener, MeasurePrompt):
            return await job.send(await self._sizes.of(job.opener, self._max_tokens))
        if isinstance(job.opener, ScriptRequest):
            assert self.model.voice is None, "the gateway refuses it"
            return await recite(job, job.opener, self.prompt)
        request = job.opener
        assert isinstance(request, ThinkerRequest)
        if request.transcribes and self._hearing is not None:
            return await transcribe(job, request, self._hearing)
        session_id = request.session_id or f"once-{request.job_id}"
        try:
            async with self._busy[session_id]:
                await self._think(job, request, session_id)
            if request.session_id:
                self._packing.begin(session_id)
        finally:
            if not request.session_id:
                await asyncio.shield(self.close_session(session_id))

    async def close_session(self, session_id: str) -> None:
        try:
            async with self._busy[session_id]:
                self._items.pop(session_id, None)
                self._preheats.closed(session_id)
                session = self._sessions.pop(session_id, None)
                if session is not None:
                    await session.close()
        finally:
            self._busy.pop(session_id, None)

    def on_hint(self, hint: SessionHint) -> None:
        engine_session = self._engine_session(hint.session_id)
        if self._feed is not None and engine_session is not None:
            self._feed.hint(msgspec.structs.replace(hint, session_id=engine_session))

    @property
    def _max_tokens(self) -> int:
        """Limit of one prompt: the context, or the KV pool if that is smaller."""
        return self.engine.tokenizer_manager.max_req_input_len

    def load(self) -> dict[str, float]:
        feed = self._feed
        own = {
            "sessions": float(len(self._sessions)),
            **self._counts,
            **self._preheats.counts,
            "answers_late": 0.0 if feed is None else float(feed.n_late),
            "answers_missing": 0.0 if feed is None else float(feed.n_missing),
        }
        own[PROMPT_TOKENS_MOST] = float(self._max_tokens)
        hearing = self._hearing or self._ears
        heard = hearing.counts if hearing is not None else {}
        return {**self.host.load(), **self._totals.load(), **own, **heard}

    async def _bound_native(self, job: ServedJob, request: RetainNative) -> None:
        assert self._bounds and self._feed is not None, "the gateway checks the policy"
        order = RetainSession(
            request.session_id, request.sink_tokens, request.window_tokens, request.slack_tokens
        )
        if not await self._feed.retain_native(order):
            raise DeadlineError("the engine has not confirmed the bound")
        await job.send(NativeRetained(job.job_id))

    def _engine_session(self, session_id: str) -> str | None:
        session = self._sessions.get(session_id)
        return None if session is None else session.engine_session

    def _new_session(self, session_id: str) -> ThinkerSession:
        truncates, feed = self.spec.policies.truncate, self._feed
        return ThinkerSession(self.host, self.prompt, session_id, feed=feed, truncates=truncates)

    async def _read_reports(self) -> None:
        async for report in Reports(self._outbox):
            match report:
                case HiddenRows():
                    await self._states.add(report)
                case Truncated() | SessionKv() | Retained():
                    if self._feed is not None:
                        self._feed.answered(report)
                case StreamEvents():
                    self._stream_events.pass_on(report)
                case PolicyReport():
                    self._totals.take(report)

    async def _think(self, job: ServedJob, request: ThinkerRequest, session_id: str) -> None:
        history = await self._history(session_id, request, job.frames)
        session = self._sessions.setdefault(session_id, self._new_session(session_id))
        state = TurnState(
            job_id=job.job_id,
            ending=request.prefill_only,
            prefill_only=request.prefill_only,
            timely=request.timely,
            flex=request.flex,
        )
        state.options = tokens_of(request.options, self.prompt)
        state.on_generating = lambda rid: self._stream_events.add(rid, job)
        output = self._output(job, state, request, history)
        output.continues(request.continues, request.said)
        n_before = len(output.ids)
        receiving = asyncio.create_task(self._receive(job, session, state, output))
        signs = asyncio.create_task(
            show_prefill(job, self.host.prefill_tokens, lambda: len(output.ids) > n_before)
        )
        try:
            writing = self._write(job, request, session, history, state, output)
            await result_with(writing, receiving)
        finally:
            receiving.cancel()
            signs.cancel()
            await asyncio.gather(receiving, signs, return_exceptions=True)
            self._stream_events.remove(state.rid)
            self._counts["sessions_rebuilt"] += state.rebuilt
            self._counts["sessions_truncated"] += state.truncated
            self._counts["truncations_refused"] += state.refused
            if request.preheat:
                self._preheats.ended(session)
            else:
                self._preheats.used(session_id, state.rebuilt)
        if not request.prefill_only:
            self._items[session_id][request.item_key] = HistoryItem(
                key=request.item_key, role="assistant", parts=(), token_ids=tuple(output.ids)
            )
        # Not while the user speaks, or may: positions of the utterance count on what is before it.
        keeps = request.prefill_only or request.speculative
        gone = [] if keeps else await session.drop_old()
        await job.send(
            ThinkerDone(
                job.job_id,
                finish="interrupted" if state.ending and output.finish != "stop" else output.finish,
                ids=output.ids,
                text=output.parts.spoken,
                n_prompt=max(0, state.n_prompt - n_before),
                n_audio=output.n_audio,
                n_image=output.n_image,
                n_video=output.n_video,
                n_cached=state.n_cached,
                rebuilt=state.rebuilt,
                gone=[*state.dropped, *gone],
                function_calls=output.parts.calls(),
                shares=shares_of(state.options, state.logprobs) if state.options else [],
            )
        )

    def _output(
        self,
        job: ServedJob,
        state: TurnState,
        request: ThinkerRequest,
        history: list[HistoryItem],
    ) -> ResponseOutput:
        def report_heard(news: Heard) -> None:
            if self._feed is not None and state.generating is not None:
                self._feed.heard.put(state.generating, news)

        parts = ResponseParts(self.prompt.call_begin_id(), bool(request.functions))
        prompt = self.prompt
        if prompt.gives_up and (
            call := call_instead(request.functions, history, prompt.stands_for)
        ):
            parts.instead = prompt.gives_up, call
        voice = self.model.voice
        speech = None if voice is None else SpokenIds(voice, self.prompt.text_of)
        return ResponseOutput(job, self.prompt.end_ids, parts, report_heard, speech)

    async def _receive(
        self, job: ServedJob, session: ThinkerSession, state: TurnState, output: ResponseOutput
    ) -> None:
        """Act on the messages that the orchestrator sends while the turn runs."""
        async for message in job.inputs():
            match message:
                case Heard():
                    output.heard(message)
                case Interrupt():
                    session.interrupt(state)
                case Promote():
                    session.promote(state)

    async def _write(
        self,
        job: ServedJob,
        request: ThinkerRequest,
        session: ThinkerSession,
        history: list[HistoryItem],
        state: TurnState,
        output: ResponseOutput,
    ) -> None:
        instructions = self.prompt.with_functions(request.instructions, request.functions)
        if request.preheat:
            drops = request.drops_oldest
            if not await self._preheats.begin(session, instructions, history, drops, state):
                return
        sampling = sampling_of(request, self.model.sampling, self.prompt.end_ids)
        if self.prompt.gives_up and (said := words_to_say(history)):
            sampling.setdefault("ebnf", said)
        turn = session.think(
            instructions=instructions,
            history=history,
            item_key=request.item_key,
            sampling=sampling,
            state=state,
            retention=retention_of(request) if self._bounds else None,
            opening=self._opening(request),
            speculative=request.speculative,
            max_tokens=self._max_tokens,
            drops_oldest=request.drops_oldest,
            cache_salt=request.cache_salt,
        )
        prefilled: list[HistoryItem] = []
        clips: list[_Clip] = []
        told: dict[str, list[int]] = {}
        async with aclosing(turn) as events:
            async for event in events:
                match event:
                    case Started():
                        prefilled = event.items
                        output.n_audio += self._n_heard(prefilled)
                    case Prefilled():
                        if event.append.clips:
                            clips.append(await self._clip_states(event))
                            output.read(event.append.clips[0], len(clips[-1].states))
                    case Generated():
                        if prefilled:
                            told = await self._send_segments(job, prefilled, clips)
                            prefilled = []
                        await output.take(event)
        if prefilled:
            # Interrupted before a response began. The session holds the items now, so that no later
            # turn sends their segments.
            told = await self._send_segments(job, prefilled, clips)
        # Not of a turn that was cancelled: what it has sent may not have been read.
        session.told |= told

    def _n_heard(self, items: list[HistoryItem]) -> int:
        """Ids of users' speech in new items."""
        voice = self.model.voice
        heard = (item.token_ids or () for item in items if item.role == "user")
        return 0 if voice is None else sum(voice.is_code(token) for ids in heard for token in ids)

    def _opening(self, request: ThinkerRequest) -> Opening:
        if request.continues:
            return self.prompt.continued(request.continues, request.said)
        return self.prompt.opening(request.must_call)

    async def _history(
        self, session_id: str, request: ThinkerRequest, frames: list[bytes]
    ) -> list[HistoryItem]:
        known = self._items[session_id]
        # The failure of a turn that may be withdrawn may not reach the client.
        is_told = not (request.prefill_only or request.speculative)
        for item in request.items:
            new = history_item(item, frames)
            if self._hearing is not None:
                new = await self._hearing.as_text(new, is_told=is_told)
            elif self._ears is not None:
                new = await self._ears.as_ids(new, self.prompt, is_told=is_told)
            elif self.model.clip_form is not None and not request.frame:
                new = formed(new, self.model.clip_form)
            known[item.key] = new
        missing = [key for key in request.keys if key not in known]
        if missing:
            raise ItemsMissingError(f"{len(missing)} of {len(request.keys)} items unknown")
        self._items[session_id] = {key: known[key] for key in request.keys}
        return [known[key] for key in request.keys]

    async def _clip_states(self, event: Prefilled) -> "_Clip":
        """Of one clip, picture or video, just prefilled."""
        n_places = self.prompt.n_places(event.append, event.n_new)
        if self._talker_reads is None:
            return _Clip(np.empty((n_places, 0)), None)
        states, pictures = await self._states.of(event.rid, n_places, event.begin)
        return _Clip(states, pictures[0] if pictures else None)

    async def _send_segments(
        self, job: ServedJob, items: list[HistoryItem], clips: list["_Clip"]
    ) -> dict[str, list[int]]:
        """Returns what ThinkerSession.told has of the items."""
        left, told = iter(clips), dict[str, list[int]]()
        prompt = self._talker_reads
        for item in items:
            own = [next(left) for _ in self.prompt.media(item)]
            n_places = told[item.key] = [len(clip.states) for clip in own]
            if prompt is None or item.role != "user" or item.token_ids is not None:
                continue
            tensors = job.tensors()
            ref = tensors.put(np.concatenate([clip.states for clip in own])) if own else None
            ids = prompt.segment_ids(item, n_places)
            places = [at for at, token in enumerate(ids) if token in prompt.placeholders]
            begins = accumulate(n_places, initial=0)
            pictures = [
                clip.picture._replace(at=places[begin])
                for begin, clip in zip(begins, own, strict=False)
                if clip.picture is not None
            ]
            segment = WireSegment(item.key, ids, ref, pictures)
            await job.send(UserSegment(job.job_id, segment), tensors)
        return told


@dataclass(frozen=True, slots=True)
class _Clip:
    """
    states: the thinker's, [n_placeholders, thinker_hidden].
    picture: with its place in the session; None: it is audio.
    """

    states: np.ndarray
    picture: Picture | None
