"""The talker stage of a model that speaks a response piece by piece.

In: the text of any language model, as it grows. Out: codec frames, each piece an utterance of its
own, and marks that tell when the words end. A piece is one request of the engine. The next one
begins when the engine has written the one before, which then still sounds.
"""

import asyncio
import logging
import os
import re
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from sglang_live import ids
from sglang_live.aio import result_with, vital
from sglang_live.bridge.seams import PIECE_TALKER
from sglang_live.clock import Clock, MonotonicClock
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
    MOST_SILENT,
    BroughtVoices,
    FrameTalker,
    PieceTalker,
    StockTalker,
)
from sglang_live.speakable.pieces import Piece, Pieces
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
from sglang_live.stages.talker.voice_making import VoiceMaking
from sglang_live.stages.token_places import TokenPlaces
from sglang_live.stages.transport.server import ServedJob

# Slow speech has 8 characters a second. A piece that takes three times as long has missed its end.
SLOW_CHARACTER_S = 0.125
BOUND_CHARACTER_S, BOUND_SPARE_S = 0.375, 4.0
# Until a piece has ended, its words are expected to take this much longer than those before it.
_CAUTION = 1.25

Marks = list[tuple[int, float]]


@dataclass(slots=True)
class SpokenPiece:
    """
    words: ends of its words in the spoken text, and the tokens of the response up to there.
    most_frames: after which it has missed its end.
    n_frames: that have come.
    n_silent: silent frames in a row, the newest that the engine has made.
    n_marked: words with a mark.
    known: frames that another replica has made of it, until they are made again: all of its steps
        are sampled anew, because the engine's penalty counts those that it has sampled itself.
    """

    spoken: str
    words: list[tuple[int, int]]
    most_frames: int
    n_frames: int = 0
    n_silent: int = 0
    n_marked: int = 0
    known: list[list[int]] = field(default_factory=list)


class PieceSpeech:
    """
    Attributes:
        rid: of the request that is running; "": none, or its scheduler may not know it yet.
        n_frames: of all pieces.
        n_read: tokens of their prompts.
    """

    def __init__(self, model: PieceTalker, clock: Clock):
        self._model = model
        self._clock = clock
        self._cutter = Pieces(model.style)
        self._text = TokenPlaces()
        # Without a bound: the text of one response.
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._character_s = SLOW_CHARACTER_S
        self._before_s = 0.0  # speech of the pieces that have ended
        self._dropped_s = 0.0  # silence of the running one
        self._heard: tuple[Heard, float] | None = None  # with the time at which it came
        self.rid = ""
        self.n_frames = 0
        self.n_read = 0

    @property
    def n_unspeakable(self) -> int:
        return self._cutter.n_unspeakable

    # --- text ---

    def add(self, part: TalkerInput) -> None:
        self._text.add(part.text, part.n_tokens)
        pieces = self._cutter.add(part.text)
        if part.done:
            pieces += self._cutter.end()
        for piece in pieces:
            self._pieces.put_nowait(piece)
        if part.done:
            self._pieces.put_nowait(None)

    async def next(self) -> SpokenPiece | None:
        """The next piece of which something is said, as soon as it is complete; None: the end."""
        while (piece := await self._pieces.get()) is not None:
            if piece.spoken:
                return self._prepared(piece)
        return None

    def _prepared(self, piece: Piece) -> SpokenPiece:
        ends = [match.end() for match in re.finditer(r"\S+", piece.spoken)]
        most_s = BOUND_SPARE_S + BOUND_CHARACTER_S * len(piece.spoken)
        return SpokenPiece(
            piece.spoken,
            [(end, self._text.up_to(piece, end)) for end in ends],
            most_frames=round(most_s / self._model.frame_s),
        )

    # --- frames ---

    def audible(self, piece: SpokenPiece, frames: list[list[int]]) -> list[list[int]]:
        """Of the engine's next frames those that are decoded: without silence that lasts."""
        if not self._model.silent_codes:
            return frames
        kept = []
        for frame in frames:
            is_silent = frame[0] in self._model.silent_codes
            piece.n_silent = piece.n_silent + 1 if is_silent else 0
            if piece.n_silent <= MOST_SILENT:
                kept.append(frame)
        self._dropped_s += (len(frames) - len(kept)) * self._model.frame_s
        return kept

    def spoken(self, piece: SpokenPiece, n_frames: int) -> Marks:
        """Count frames that have come. Returns marks of the words that they hold, presumably.

        The share of a word in its piece is known at the end of the piece only. Until then a slow
        pace is assumed: a user who interrupts has rather heard more.
        """
        self.n_frames += n_frames
        piece.n_frames += n_frames
        marks: Marks = []
        for end, n_tokens in piece.words[piece.n_marked :]:
            if (end_s := end * self._character_s) > piece.n_frames * self._model.frame_s:
                break
            marks.append((n_tokens, self._before_s + end_s))
        piece.n_marked += len(marks)
        return marks

    def end(self, piece: SpokenPiece) -> Marks:
        """All words of a piece that has ended, by their shares of its sound."""
        piece_s = piece.n_frames * self._model.frame_s
        character_s = piece_s / len(piece.spoken)
        marks = [(n_tokens, self._before_s + end * character_s) for end, n_tokens in piece.words]
        self._before_s += piece_s
        self._dropped_s = 0.0
        self._character_s = min(SLOW_CHARACTER_S, _CAUTION * character_s)
        return marks

    # --- what was heard ---

    def note_heard(self, news: Heard) -> None:
        self._heard = news, self._clock.now_s()

    def heard_of_request(self) -> Heard | None:
        """What was heard of the running request: behind its begin while pieces before it are heard.
        None: it is not known. The engine counts all frames that it makes, dropped ones too."""
        if self._heard is None:
            return None
        news, at_s = self._heard
        since_s = news.speed * (self._clock.now_s() - at_s) if news.advancing else 0.0
        heard_s = news.heard_s + since_s - self._before_s + self._dropped_s
        return msgspec.structs.replace(news, heard_s=heard_s)


log = logging.getLogger(__name__)

MAX_RUNNING = 32
_MOST_SEED = 2**63 - 1


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
        speech = PieceSpeech(self.model, self._clock)
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
            spoken = PieceRequest(
                rid=ids.new_rid(FLEX_PREFIX if request.flex else SPEAK_PREFIX, job.job_id),
                text=piece.spoken,
                prompt=self._prompt(request, piece.spoken),
                # Of its own: equal pieces need not sound equal.
                seed=(request.seed + number) & _MOST_SEED,
                temperature=request.temperature,
                most_frames=piece.most_frames,
            )
            speech.n_read += len(spoken.prompt)
            number += 1
            piece.known = known.popleft() if known else []
            speech.spoken(piece, len(piece.known))
            if known:  # another replica has ended it
                speech.end(piece)
                is_cut |= piece.n_frames >= piece.most_frames
                continue
            is_cut |= await self._speak_piece(job, speech, piece, spoken)
        return is_cut

    def _prompt(self, request: TalkerRequest, text: str) -> list[int]:
        if not request.speaker:
            return self.model.prompt(request.voice, text)
        assert isinstance(self.model, BroughtVoices), "it made the voice"
        return self.model.prompt_in(np.frombuffer(request.speaker, "<f4"), text)

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
                        self._counts["silence_dropped"] += len(frames) - len(kept)
                        self._pass_heard(speech)
                    await self._send(job, speech, piece, kept)
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
