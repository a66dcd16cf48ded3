"""The vocoder stage of a model without a talker: it reads the text of responses aloud.

In: text as it grows. Out: PCM, with the time at which each word's tokens end. A text is cut into
pieces (speakable/), and a worker thread synthesises one piece at a time, that of the response whose
audio ends first. The first words of a response sound before the rest of their piece has come, if
that will have come by the time they are over.
"""

import asyncio
import itertools
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from sglang_live.aio import result_with, vital
from sglang_live.bridge.platform import cpu
from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import CapacityError, StageFailedError
from sglang_live.messages import (
    Pcm,
    SoundPlace,
    VocoderDone,
    VocoderEnd,
    VocoderRequest,
    VocoderText,
)
from sglang_live.models.family import family_at, part
from sglang_live.models.speech import Speech, Voice
from sglang_live.policy.flex import FlexConfig, flex_due_s
from sglang_live.speakable.pieces import Limits, Piece, Pieces
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.token_places import TokenPlaces
from sglang_live.stages.transport.server import ServedJob
from sglang_live.stages.vocoder.config import VocoderConfig
from sglang_live.stages.vocoder.piece_sound import PieceSound

log = logging.getLogger(__name__)

# A message of this duration: an interruption need not wait for the end of a sentence.
_MESSAGE_S = 0.5
# First words that may sound early, with the last one, which is read but not sent: fewer would be
# over before the rest has come.
_BEGINNING_WORDS = 5
# Multiple of the time until the rest has come that the first words must last: the text may slow
# down, and where users have spoken at the same time, other responses may begin in between.
_SAFETY, _SAFETY_BESIDE_OTHERS = 1.5, 2.5
# Two responses at once are a reason for caution for this long.
_ALONE_S = 60.0


@dataclass(order=True, slots=True)
class _Order:
    """One piece to synthesise. due_s: when the audio of its response so far ends; smaller is
    sooner."""

    due_s: float
    number: int
    job: ServedJob = field(compare=False)
    text: str = field(compare=False)
    voice: str = field(compare=False)
    speech: asyncio.Future[Speech] = field(compare=False)


class ReadingStage:
    def __init__(self, spec: StageSpec):
        voice = family_at(spec.family).voice
        assert voice is not None, "a model without a talker has a voice"
        self._voice: Voice = part(voice)(Path(spec.model_path))
        self._max_streams = VocoderConfig(**spec.engine_args).max_streams
        begin = cpu.begin_computing if cpu.is_active() else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="voice", initializer=begin)
        self._flex = FlexConfig()
        self._orders: asyncio.PriorityQueue[_Order] = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._jobs = 0
        self._beside_others_s = -math.inf  # latest time at which two responses were in progress
        # Heard responses that send a piece and then order the next one at once.
        self._coming: set[str] = set()
        self._changed = asyncio.Event()  # an order came, or is not coming
        counts = ("pieces", "begun_early", "not_begun", "unspeakable", "failed")
        self._counts = dict.fromkeys(counts, 0.0)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        voice = self._voice.voices[0]
        await loop.run_in_executor(self._worker, self._voice.synthesise, "Hello.", voice)
        self._working = vital(self._work(), "voice")

    async def run(self, job: ServedJob) -> None:
        request = job.opener
        assert isinstance(request, VocoderRequest)
        if self._jobs >= self._max_streams:
            raise CapacityError(f"the vocoder reads {self._jobs} responses already")
        self._jobs += 1
        self._note_company()
        begins_early = self._voice.times_words and not request.flex
        response = _Response(job, request, Pieces(self._voice.style), begins_early)
        cutting = asyncio.create_task(self._cut(response))
        try:
            await self._speak(response, cutting)
        finally:
            self._note_company()
            self._jobs -= 1
            self._has_ordered(job)
            cutting.cancel()
        await job.send(VocoderDone(job.job_id))

    async def close_session(self, session_id: str) -> None:
        """A vocoder keeps nothing between jobs."""

    def load(self) -> dict[str, float]:
        return {"streams": float(self._jobs), **self._counts}

    async def _cut(self, response: "_Response") -> None:
        """Cut the response's text into pieces as it comes."""
        async for message in response.job.inputs():
            if isinstance(message, VocoderText):
                response.add_text(message)
            elif isinstance(message, VocoderEnd):
                self._counts["unspeakable"] += response.end_text()
                return

    async def _speak(self, response: "_Response", cutting: asyncio.Task[None]) -> None:
        while True:
            if response.pieces.empty():
                self._has_ordered(response.job)
            piece = await result_with(response.pieces.get(), cutting)
            if piece is None:
                return
            if isinstance(piece, _Beginning):
                await self._begin(response, piece)
            elif response.sounds(piece):
                sound = await self._sound(response, piece)
                if response.begun is not None:
                    sound, response.begun = sound.behind(response.begun), None
                await response.send(piece, sound)
                response.end_piece()

    async def _begin(self, response: "_Response", beginning: "_Beginning") -> None:
        """Send the first words of a piece, unless it is there, or would be there too late; in any
        case where another vocoder has sent them."""
        if not (response.pieces.empty() or response.place.early):
            return
        ordered_s = time.monotonic()
        sound = await self._sound(response, beginning.piece)
        if len(sound.words) < _BEGINNING_WORDS:
            return  # words without sound
        sound, now_s = sound.without_last_word(), time.monotonic()
        complete_s = beginning.complete_s if response.pieces.empty() else now_s
        rest_takes_s = Limits().first_most / _BEGINNING_WORDS * (now_s - ordered_s)
        alone = now_s - self._beside_others_s > _ALONE_S
        safety = _SAFETY if alone else _SAFETY_BESIDE_OTHERS
        wait_s = max(complete_s - now_s, 0.0) + rest_takes_s
        if response.place.early or safety * wait_s <= sound.duration_s:
            self._counts["begun_early"] += 1
            response.begun = sound
            response.place = replace(response.place, early=True)
            await response.send(beginning.piece, sound)
        else:
            self._counts["not_begun"] += 1

    def _note_company(self) -> None:
        if self._jobs > 1:
            self._beside_others_s = time.monotonic()

    async def _sound(self, response: "_Response", piece: Piece) -> PieceSound:
        speech = await self._synthesised(response, piece.spoken)
        return PieceSound.of(speech, self._voice.sample_rate_hz)

    async def _synthesised(self, response: "_Response", text: str) -> Speech:
        due_s = response.due_s(self._flex)
        speech: asyncio.Future[Speech] = asyncio.get_running_loop().create_future()
        job, voice = response.job, response.request.voice
        self._orders.put_nowait(_Order(due_s, next(self._numbers), job, text, voice, speech))
        self._has_ordered(job)
        return await speech

    def _has_ordered(self, job: ServedJob) -> None:
        """The response has ordered its next piece, or has none now."""
        self._coming.discard(job.job_id)
        self._changed.set()

    async def _next_order(self) -> _Order:
        """The piece that is due first. One of flex that is not due yet waits for the next pieces of
        heard responses: a voice that has begun a piece also ends it."""
        while True:
            order = await self._orders.get()
            left_s = order.due_s - time.monotonic()
            if not _is_flex(order.job) or left_s <= 0 or not self._coming:
                return order
            self._orders.put_nowait(order)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            order = await self._next_order()
            if order.speech.cancelled():
                continue
            self._counts["pieces"] += 1
            try:
                speech = await loop.run_in_executor(
                    self._worker, self._voice.synthesise, order.text, order.voice
                )
            except Exception as error:  # of any voice: this response fails, the stage goes on
                self._counts["failed"] += 1
                log.exception("voice_failed n_characters=%d", len(order.text))
                if not order.speech.cancelled():
                    order.speech.set_exception(StageFailedError(f"the voice failed: {error}"))
                continue
            if not order.speech.cancelled():
                order.speech.set_result(speech)
                if not _is_flex(order.job):
                    self._coming.add(order.job.job_id)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The first words of a piece. complete_s: when the piece will be complete, at most, if its text
    comes as fast as so far."""

    piece: Piece
    complete_s: float


class _Response:
    """
    Args:
        begins_early: its first words may sound before the rest of their piece has come.
    Attributes:
        pieces: that are complete, in order; None: there are no more.
        begun: sound of the first words of the next piece, which was sent.
        place: of what was sent, by this vocoder or by one before it.
    """

    def __init__(
        self, job: ServedJob, request: VocoderRequest, cutter: Pieces, begins_early: bool
    ) -> None:
        self.job = job
        self.request = request
        # Without a bound: the text of one response.
        self.pieces: asyncio.Queue[Piece | _Beginning | None] = asyncio.Queue()
        self.begun: PieceSound | None = None
        self.place = request.sent or SoundPlace()
        self._cutter = cutter
        self._text = TokenPlaces()
        self._began_s = time.monotonic()
        self._spoken_s = self.place.begun_s
        self._text_since_s: float | None = None
        self._may_begin = self.place.early if request.sent else begins_early
        # Of what another vocoder has sent: pieces, and samples of the next one.
        self._n_sounded = self.place.utterance
        self._n_sent = self.place.n_done
        self.place = replace(self.place, n_done=0)

    def add_text(self, message: VocoderText) -> None:
        now_s = time.monotonic()
        if self._text_since_s is None:
            self._text_since_s = now_s
        self._text.add(message.text, message.n_tokens)
        for piece in self._cutter.add(message.text):
            self._may_begin = False
            self.pieces.put_nowait(piece)
        beginning = self._cutter.beginning(_BEGINNING_WORDS) if self._may_begin else None
        if beginning is not None:
            self._may_begin = False
            per_word_s = (now_s - self._text_since_s) / (_BEGINNING_WORDS - 1)
            n_more = Limits().first_most - _BEGINNING_WORDS
            self.pieces.put_nowait(_Beginning(beginning, now_s + n_more * per_word_s))

    def end_text(self) -> int:
        """Returns the number of letters that the voice cannot speak."""
        for piece in self._cutter.end():
            self.pieces.put_nowait(piece)
        self.pieces.put_nowait(None)
        return self._cutter.n_unspeakable

    def due_s(self, flex: FlexConfig) -> float:
        """When its next piece is due; the first one goes before all responses that sound."""
        if self.request.flex:
            return flex_due_s(self._began_s, self._spoken_s, flex)
        return self._began_s + self._spoken_s if self._spoken_s else 0.0

    def sounds(self, piece: Piece) -> bool:
        """Whether the piece has sound that was not sent; asked once of each, in order."""
        if piece.spoken and self._n_sounded:
            self._n_sounded -= 1
            return False
        return bool(piece.spoken)

    async def send(self, piece: Piece, sound: PieceSound) -> None:
        marks = [
            (self._text.up_to(piece, word.end), self._spoken_s + word.end_s) for word in sound.words
        ]
        n = round(_MESSAGE_S * OUTPUT_RATE_HZ)
        first, before = min(self._n_sent, len(sound.pcm)), self.place.n_done
        self._n_sent -= first
        first_s = self._spoken_s + first / OUTPUT_RATE_HZ
        marks = [mark for mark in marks if not first or mark[1] > first_s]
        for begin in range(first, len(sound.pcm), n):
            end = min(begin + n, len(sound.pcm))
            end_s = self._spoken_s + (begin + n) / OUTPUT_RATE_HZ
            is_last = end == len(sound.pcm)
            ready = [mark for mark in marks if is_last or mark[1] <= end_s]
            marks = marks[len(ready) :]
            self.place = replace(self.place, n_done=before + end)
            pcm = sound.pcm[begin:end].tobytes()
            await self.job.send(Pcm(self.job.job_id, pcm, ready, self.place))
        self.place = replace(self.place, n_done=before + len(sound.pcm))
        self._spoken_s += sound.duration_s

    def end_piece(self) -> None:
        self.place = SoundPlace(self.place.utterance + 1, begun_s=self._spoken_s)


def _is_flex(job: ServedJob) -> bool:
    assert isinstance(job.opener, VocoderRequest)
    return job.opener.flex
