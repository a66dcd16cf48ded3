"""The talker stage of a model that speaks a response piece by piece.

In: the text of any language model, as it grows. Out: codec frames, each piece an utterance of its
own, and marks that tell when the words end. A piece is one request of the engine. The next one
begins when the engine has written the one before, which then still sounds.
"""

import asyncio
import logging
import os
from collections import deque
from contextlib import aclosing
from pathlib import Path

import numpy as np

from sglang_live import ids
from sglang_live.aio import result_with, vital
from sglang_live.bridge.seams import PIECE_TALKER
from sglang_live.clock import MonotonicClock
from sglang_live.engine_channel.inbox import INBOX_ENV, OUTBOX_ENV, STAGE_ENV, STEPS_ENV, steps_text
from sglang_live.ids import FLEX_PREFIX, SPEAK_PREFIX, WARM_UP
from sglang_live.messages import (
    CodecFrames,
    Frames,
    Heard,
    MakeVoice,
    PolicyReport,
    StreamEvents,
    TalkerDone,
    TalkerInput,
    TalkerRequest,
)
from sglang_live.models.codecs import END_CODE
from sglang_live.models.piece_talker import (
    BroughtVoices,
    FrameTalker,
    PiecePrompt,
    PieceTalker,
    StockTalker,
)
from sglang_live.models.speech_lm.mixing import MixedVoice
from sglang_live.stages.engine_host import EXTERNAL_MODELS_ENV, EngineHost
from sglang_live.stages.engine_link import (
    FeedSocket,
    HeardFeed,
    PolicyTotals,
    Reports,
    StreamEventRoutes,
)
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.talker.piece_engine import (
    OwnPieces,
    PieceEngine,
    PieceRequest,
    StockPieces,
)
from sglang_live.stages.talker.piece_speech import PieceSpeech, SpokenPiece
from sglang_live.stages.talker.voice_making import VoiceMaking
from sglang_live.stages.transport.server import ServedJob

log = logging.getLogger(__name__)

MAX_RUNNING = 32
_MOST_SEED = 2**63 - 1
# Words of the text that a voice needs before it can be mixed, at most: as many as a sentence has,
# for which a piece waits.
MOST_LEAD = 25
# Room of a passage of a hundred words, whose own bound is known with its end.
# Source: max_token_text_ratio of CosyVoice (llm/llm.py).
_MOST_STEPS = 2_000


class PieceStage:
    def __init__(self, spec: StageSpec, model: PieceTalker):
        inbox, outbox = spec.socket_path("inbox"), spec.socket_path("outbox")
        self.model = model
        os.environ |= {
            INBOX_ENV: inbox,
            OUTBOX_ENV: outbox,
            STEPS_ENV: steps_text(
                model.frame_s / model.steps_per_frame, model.chunk_steps, model.decode_s
            ),
        }
        self._outbox, feed, self._clock = outbox, FeedSocket(inbox), MonotonicClock()
        self._pieces: PieceEngine
        if isinstance(model, StockTalker):
            self.host = _stock_host(spec, model)
            self._pieces = StockPieces(self.host, model)
        else:
            assert isinstance(model, FrameTalker)
            self.host = _own_host(spec, model)
            self._pieces = OwnPieces(self.host, model, feed.send)
        self.engine = self.host.engine
        self._heard = HeardFeed(feed.send, self._clock) if spec.policies else None
        self._totals = PolicyTotals()
        self._stream_events = StreamEventRoutes()
        self._voices = VoiceMaking(model)
        self._n_jobs = 0
        names = ("pieces", "frames", "speech_truncated", "unspeakable", "diverged")
        self._counts = dict.fromkeys((*names, "silence_dropped"), 0.0)

    async def start(self) -> None:
        self._reader = vital(self._read_reports(), "read reports")
        request = PieceRequest(
            rid=ids.new_rid(SPEAK_PREFIX, WARM_UP),
            text="Hello.",
            prompt=self.model.prompt(self.model.voices[0], "Hello."),
            seed=0,
            temperature=None,
            most_frames=2,
        )
        async with aclosing(self._pieces.frames(request)) as found:
            async for _ in found:
                pass
        await self.host.freeze()
        self.host.watch_over()

    async def run(self, job: ServedJob) -> None:
        request = job.opener
        if isinstance(request, MakeVoice):
            return await self._voices.run(job, request)
        assert isinstance(request, TalkerRequest)
        speech = PieceSpeech(self.model, self._clock, self._mixed_voice(request))
        reading = asyncio.create_task(self._read(job, speech))
        self._n_jobs += 1
        try:
            is_cut = await result_with(self._speak(job, request, speech), reading)
        finally:
            self._n_jobs -= 1
            self._counts["unspeakable"] += speech.n_unspeakable
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        finish = "length" if is_cut else "stop"
        await job.send(TalkerDone(job.job_id, finish, speech.n_frames, n_read=speech.n_read))

    async def close_session(self, session_id: str) -> None:
        """It keeps nothing of a session."""

    def load(self) -> dict[str, float]:
        own = {"replies": float(self._n_jobs), **self._counts, **self._pieces.counts}
        return {**self.host.load(), **self._totals.load(), **own}

    async def _read(self, job: ServedJob, speech: PieceSpeech) -> None:
        async for message in job.inputs():
            if isinstance(message, TalkerInput):
                speech.add(message)
            elif isinstance(message, Heard):
                speech.note_heard(message)
                self._pass_heard(speech)

    def _pass_heard(self, speech: PieceSpeech) -> None:
        if self._heard is not None and speech.rid and (news := speech.heard_of_request()):
            self._heard.put(speech.rid, news)

    async def _speak(self, job: ServedJob, request: TalkerRequest, speech: PieceSpeech) -> bool:
        """Speak piece after piece. Returns whether any of them did not end by itself."""
        is_cut, number = False, 0
        known = self._known(request)
        while (piece := await speech.next()) is not None:
            if piece.mixed and not await piece.mixed.can_be_mixed():
                piece.mixed = None
            mixed = piece.mixed
            prompt = PiecePrompt(mixed.prompt()) if mixed else self._prompt(request, piece.spoken)
            spoken = PieceRequest(
                rid=ids.new_rid(FLEX_PREFIX if request.flex else SPEAK_PREFIX, job.job_id),
                text=piece.spoken,
                prompt=prompt.ids,
                rows=prompt.rows,
                # Of its own: equal pieces need not sound equal.
                seed=(request.seed + number) & _MOST_SEED,
                temperature=request.temperature,
                most_frames=_MOST_STEPS if mixed else piece.most_frames,
                mixed=mixed,
            )
            speech.n_read += len(spoken.prompt)
            number += 1
            piece.known = known.popleft() if known else []
            speech.spoken(piece, len(piece.known))
            if known:  # another replica has ended it
                if mixed:
                    await mixed.complete()
                speech.end(piece)
                is_cut |= piece.n_frames >= piece.most_frames
                continue
            is_cut |= await self._speak_piece(job, speech, piece, spoken)
        return is_cut

    def _prompt(self, request: TalkerRequest, text: str) -> PiecePrompt:
        if not request.speaker:
            return PiecePrompt(self.model.prompt(request.voice, text))
        assert isinstance(self.model, BroughtVoices), "it made the voice"
        return self.model.prompt_in(np.frombuffer(request.speaker, "<f4"), text)

    def _mixed_voice(self, request: TalkerRequest) -> MixedVoice | None:
        is_known = request.text_grows and not request.speaker
        if not is_known or not isinstance(self.model, FrameTalker):
            return None
        voice = self.model.mixed_voice(request.voice)
        if voice is None or voice.n_least - len(voice.words) > MOST_LEAD:
            return None
        return voice

    def _known(self, request: TalkerRequest) -> deque[list[list[int]]]:
        """The frames that another replica has made, by piece; last those of the piece that it has
        not ended."""
        rows = np.frombuffer(request.codes, "<i2").reshape(-1, self.model.codes_per_frame)
        pieces: deque[list[list[int]]] = deque([[]] if len(rows) else [])
        for row in rows.tolist():
            if row[0] == END_CODE:
                pieces.append([])
            else:
                pieces[-1].append(row)
        return pieces

    async def _speak_piece(
        self, job: ServedJob, speech: PieceSpeech, piece: SpokenPiece, request: PieceRequest
    ) -> bool:
        """Returns whether the piece reached the bound of its length."""
        rid, is_cut = request.rid, False
        self._stream_events.add(rid, job)
        self._counts["pieces"] += 1
        try:
            async with aclosing(self._pieces.frames(request)) as found:
                async for frames, finish in found:
                    is_cut = finish == "length"
                    if not speech.rid:
                        # The scheduler knows it now, and would have ignored it before.
                        speech.rid = rid
                        self._pass_heard(speech)
                    kept = speech.audible(piece, frames)
                    if len(kept) < len(frames):
                        n_codes = sum(frame[0] >= 0 for frame in frames)
                        self._counts["silence_dropped"] += n_codes - len(kept)
                        self._pass_heard(speech)
                    await self._send(job, speech, piece, kept)
                    if piece.misses_end:
                        is_cut = True
                        break
        finally:
            speech.rid = ""
            self._stream_events.remove(rid)
            if self._heard is not None:
                self._heard.forget(rid)
        end = np.full((1, self.model.codes_per_frame), END_CODE, "<i2")
        await job.send(CodecFrames(job.job_id, end.tobytes(), 0, speech.end(piece)))
        if is_cut:
            self._counts["speech_truncated"] += 1
            log.warning("speech_truncated job=%s n_frames=%d", job.job_id, piece.n_frames)
        return is_cut

    async def _send(
        self, job: ServedJob, speech: PieceSpeech, piece: SpokenPiece, frames: list[list[int]]
    ) -> None:
        known, piece.known = piece.known[: len(frames)], piece.known[len(frames) :]
        if known != frames[: len(known)]:
            # What follows goes with the frames of this replica, which nearly begin alike.
            self._counts["diverged"] += 1
            log.error("speech_diverged job=%s", job.job_id)
        frames = frames[len(known) :]
        if piece.mixed and piece.mixed.is_complete:
            frames = frames[: max(0, piece.most_frames - piece.n_frames)]
        if not frames:
            return
        self._counts["frames"] += len(frames)
        marks = speech.spoken(piece, len(frames))
        codes = np.asarray(frames, dtype="<i2").tobytes()
        await job.send(
            CodecFrames(job.job_id, codes, len(frames), marks, frame_s=self.model.frame_s)
        )

    async def _read_reports(self) -> None:
        async for report in Reports(self._outbox):
            if isinstance(report, StreamEvents):
                self._stream_events.pass_on(report)
            elif isinstance(report, Frames):
                self._pieces.take(report)
            elif isinstance(report, PolicyReport):
                self._totals.take(report)


def _stock_host(spec: StageSpec, model: StockTalker) -> EngineHost:
    os.environ[STAGE_ENV] = PIECE_TALKER
    args = {
        "skip_tokenizer_init": True,
        # SGLang's kernels of other backends take no seeds.
        "sampling_backend": "pytorch",
        "stream_interval": model.steps_per_frame,
        "max_running_requests": MAX_RUNNING,
        **model.engine_args(Path(spec.cache_dir)),
        **spec.engine_args,
    }
    return EngineHost(spec, args, engine=PIECE_TALKER)


def _own_host(spec: StageSpec, model: FrameTalker) -> EngineHost:
    os.environ[EXTERNAL_MODELS_ENV] = model.external_models
    n_running = spec.engine_args.get("max_running_requests", MAX_RUNNING)
    args = {
        "skip_tokenizer_init": True,
        "max_running_requests": n_running,
        **model.engine_args(Path(spec.cache_dir), n_running + 2),
        **spec.engine_args,
    }
    return EngineHost(spec, args)
