"""The vocoder stage of a model without a talker: it reads the text of responses aloud.

In: text as it grows. Out: PCM, with the time at which each word's tokens end. A text is cut into
pieces (speakable/), and a worker thread synthesises one piece at a time, that of the response whose
audio ends first.
"""

import asyncio
import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soxr

from sglang_live.aio import result_with, vital
from sglang_live.bridge.platform import cpu
from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import CapacityError, StageFailedError
from sglang_live.messages import Pcm, VocoderDone, VocoderEnd, VocoderRequest, VocoderText
from sglang_live.models.family import family_at, part
from sglang_live.models.speech import Speech, Voice
from sglang_live.policy.flex import FlexConfig, flex_due_s
from sglang_live.speakable.pieces import Piece, Pieces
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.token_places import TokenPlaces
from sglang_live.stages.transport.server import ServedJob
from sglang_live.stages.vocoder.config import VocoderConfig

log = logging.getLogger(__name__)

# A message of this duration: an interruption need not wait for the end of a sentence.
_MESSAGE_S = 0.5
# Silence that is left at the beginning and at the end of a piece; voices add more. Quieter than a
# hundredth of the loudest sample is silent.
_LEAD_S, _TAIL_S, _SILENT = 0.03, 0.2, 100


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
        self._numbers, self._jobs = itertools.count(), 0
        # Heard responses that send a piece and then order the next one at once.
        self._coming: set[str] = set()
        self._changed = asyncio.Event()  # an order came, or is not coming
        self._counts = dict.fromkeys(("pieces", "unspeakable", "failed"), 0.0)

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
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        text = TokenPlaces()
        cutting = asyncio.create_task(self._cut(job, text, pieces))
        try:
            await self._speak(job, request, text, pieces, cutting)
        finally:
            self._jobs -= 1
            self._has_ordered(job)
            cutting.cancel()
        await job.send(VocoderDone(job.job_id))

    async def close_session(self, session_id: str) -> None:
        """A vocoder keeps nothing between jobs."""

    def load(self) -> dict[str, float]:
        return {"streams": float(self._jobs), **self._counts}

    async def _cut(
        self, job: ServedJob, text: TokenPlaces, pieces: "asyncio.Queue[Piece | None]"
    ) -> None:
        """Cut the job's text into pieces as it comes."""
        cutter = Pieces(self._voice.style)
        async for message in job.inputs():
            if isinstance(message, VocoderText):
                text.add(message.text, message.n_tokens)
                found = cutter.add(message.text)
            elif isinstance(message, VocoderEnd):
                found = cutter.end()
            else:
                continue
            for piece in found:
                pieces.put_nowait(piece)
            if isinstance(message, VocoderEnd):
                self._counts["unspeakable"] += cutter.n_unspeakable
                pieces.put_nowait(None)
                return

    async def _speak(
        self,
        job: ServedJob,
        request: VocoderRequest,
        text: TokenPlaces,
        pieces: "asyncio.Queue[Piece | None]",
        cutting: asyncio.Task[None],
    ) -> None:
        began_s, spoken_s = time.monotonic(), 0.0
        while True:
            if pieces.empty():
                self._has_ordered(job)
            piece = await result_with(pieces.get(), cutting)
            if piece is None:
                return
            if not piece.spoken:
                continue
            # The first piece of a response goes before all that already sound.
            due_s = began_s + spoken_s if spoken_s else 0.0
            if request.flex:
                due_s = flex_due_s(began_s, spoken_s, self._flex)
            speech = await self._synthesised(job, piece.spoken, request.voice, due_s)
            spoken_s += await self._send(job, piece, speech, text, spoken_s)

    async def _synthesised(self, job: ServedJob, text: str, voice: str, due_s: float) -> Speech:
        speech: asyncio.Future[Speech] = asyncio.get_running_loop().create_future()
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
                await asyncio.wait_for(self._changed.wait(), left_s)

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

    async def _send(
        self, job: ServedJob, piece: Piece, speech: Speech, text: TokenPlaces, from_s: float
    ) -> float:
        """Send one piece's sound. Returns its duration in seconds."""
        whole = self._at_output_rate(speech.pcm)
        first, last = _sounding(whole)
        pcm = whole[first:last]
        shift_s, end_s = from_s - first / OUTPUT_RATE_HZ, from_s + len(pcm) / OUTPUT_RATE_HZ
        marks = [
            (
                text.up_to(piece, word.end),
                min(shift_s + word.end_s, end_s),
            )
            for word in speech.words
        ]
        n = round(_MESSAGE_S * OUTPUT_RATE_HZ)
        for begin in range(0, len(pcm), n):
            end_s = from_s + (begin + n) / OUTPUT_RATE_HZ
            is_last = begin + n >= len(pcm)
            ready = [mark for mark in marks if is_last or mark[1] <= end_s]
            marks = marks[len(ready) :]
            await job.send(Pcm(job.job_id, pcm[begin : begin + n].tobytes(), ready))
        return len(pcm) / OUTPUT_RATE_HZ

    def _at_output_rate(self, pcm: np.ndarray) -> np.ndarray:
        rate_hz = self._voice.sample_rate_hz
        if rate_hz == OUTPUT_RATE_HZ:
            return pcm
        resampled: np.ndarray = soxr.resample(pcm, rate_hz, OUTPUT_RATE_HZ)
        return resampled


def _is_flex(job: ServedJob) -> bool:
    assert isinstance(job.opener, VocoderRequest)
    return job.opener.flex


def _sounding(pcm: np.ndarray) -> tuple[int, int]:
    """The samples of a piece without the silence around it; all of them if it is silent."""
    level = np.abs(pcm.astype(np.int32))
    loud = np.flatnonzero(level * _SILENT > level.max(initial=0))
    if not len(loud):
        return 0, len(pcm)
    first = int(loud[0]) - round(_LEAD_S * OUTPUT_RATE_HZ)
    last = int(loud[-1]) + 1 + round(_TAIL_S * OUTPUT_RATE_HZ)
    return max(0, first), min(len(pcm), last)
