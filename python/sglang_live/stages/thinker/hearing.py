"""Speech of users as text, for a language model that only reads, or as ids, for one that hears by
them.

In: history items with audio. Out: the same items with the words in it, or as ids. A worker thread
recognises one clip of a turn at a time, another one those that are only transcribed and may be
long. A clip is recognised once, unless a turn would wait for the other worker.
Owner: one Hearing per thinker stage of a family with a recogniser, one IdHearing with ears.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

from sglang_live.core import AudioPart, HeardToken, HistoryItem, TextPart
from sglang_live.errors import StageFailedError
from sglang_live.models.own_voice import Ears
from sglang_live.models.prompt import PiecewisePrompt
from sglang_live.models.speech import DetailedRecogniser, Recogniser

log = logging.getLogger(__name__)

# Transcripts of clips, for the turn, its transcript for the client, and a retry.
_KEPT = 1024
_T = TypeVar("_T")


_Heard = TypeVar("_Heard", str, Sequence[int])


class _Clips(Generic[_Heard]):
    """
    Attributes:
        counts: clips that were recognised, for how long, and how many failed.
    """

    def __init__(self, hear: Callable[[np.ndarray], _Heard], nothing: _Heard):
        """nothing: what is heard of a clip that has failed."""
        self._hear: Callable[[np.ndarray], _Heard] = hear
        self._nothing: _Heard = nothing
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="recogniser")
        self._patient_worker = ThreadPoolExecutor(1, thread_name_prefix="transcriber")
        self._told: OrderedDict[bytes, None] = OrderedDict()  # clips whose failure was told
        self._clips: OrderedDict[bytes, asyncio.Task[_Heard]] = OrderedDict()
        self._patient: set[asyncio.Task[_Heard]] = set()  # not done, of the other worker
        names = ("clips_recognised", "recognition_s", "recognitions_failed", "clips_given_up")
        self.counts = dict.fromkeys(names, 0.0)

    async def _heard_in(self, pcm: np.ndarray, is_told: bool) -> _Heard:
        """Of a clip of a turn. is_told: whether the client learns of a failure."""
        key = _key(pcm)
        if key in self._told:
            self.counts["clips_given_up"] += 1
            return self._nothing
        try:
            return await self._heard_by(pcm, self._worker)
        except StageFailedError:
            if is_told:
                self._told[key] = None
                while len(self._told) > _KEPT:
                    self._told.popitem(last=False)
            raise

    async def _heard_by(self, pcm: np.ndarray, worker: Executor) -> _Heard:
        """What is in a clip: [n] int16, mono, at INPUT_RATE_HZ."""
        key = _key(pcm)
        task = self._clips.get(key)
        has_failed = task is not None and task.done() and (task.cancelled() or task.exception())
        may_be_late = worker is self._worker and task in self._patient
        if task is None or has_failed or may_be_late:
            task = self._clips[key] = asyncio.create_task(self._recognise(pcm, worker))
            if worker is self._patient_worker:
                self._patient.add(task)
                task.add_done_callback(self._patient.discard)
        self._clips.move_to_end(key)
        while len(self._clips) > _KEPT:
            self._clips.popitem(last=False)
        # A turn that is cancelled does not cancel the recognition: the next turn has the clip, too.
        return await asyncio.shield(task)

    async def _recognise(self, pcm: np.ndarray, worker: Executor) -> _Heard:
        return await self._counted(self._hear, pcm, worker)

    async def _counted(
        self, hear: Callable[[np.ndarray], _T], pcm: np.ndarray, worker: Executor
    ) -> _T:
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            heard = await loop.run_in_executor(worker, hear, pcm)
        except Exception as error:
            self.counts["recognitions_failed"] += 1
            log.exception("recogniser_failed n_samples=%d", len(pcm))
            raise StageFailedError(f"the recogniser failed: {error}") from error
        self.counts["clips_recognised"] += 1
        self.counts["recognition_s"] += time.monotonic() - began_s
        return heard


class Hearing(_Clips[str]):
    """Speech as text."""

    def __init__(self, recogniser: Recogniser):
        super().__init__(recogniser.transcribe, "")
        self._recogniser = recogniser

    async def as_text(self, item: HistoryItem, *, is_told: bool = True) -> HistoryItem:
        """The item with the words of its audio in place of it.

        Args:
            is_told: whether the client learns of a failure. Not while the user still speaks.
        Raises:
            StageFailedError: the recogniser failed. Once the client was told, the clip has no words
                the next time, so that the conversation goes on.
        """
        if not any(isinstance(part, AudioPart) for part in item.parts):
            return item
        texts = [
            await self._heard_in(part.pcm, is_told) if isinstance(part, AudioPart) else part.text
            for part in item.parts
            if isinstance(part, AudioPart | TextPart)  # the gateway refuses pictures
        ]
        words = " ".join(text for text in texts if text)
        if words and not item.opens:
            words = f" {words}"  # it continues the utterance
        return replace(item, parts=(TextPart(words),))

    async def transcript_of(self, pcm: np.ndarray) -> str:
        """The words of a clip that no response waits for.

        Raises:
            StageFailedError: the recogniser failed.
        """
        return await self._heard_by(pcm, self._patient_worker)

    async def detailed_transcript_of(
        self, pcm: np.ndarray, *, translates: bool
    ) -> list[HeardToken]:
        """The same, token by token. Raises as transcript_of."""
        assert isinstance(self._recogniser, DetailedRecogniser), "the gateway refuses the others"
        hear = partial(self._recogniser.transcribe_in_detail, translates=translates)
        return await self._counted(hear, pcm, self._patient_worker)


class IdHearing(_Clips[Sequence[int]]):
    """Speech as ids."""

    def __init__(self, ears: Ears):
        super().__init__(ears.ids, ())

    async def as_ids(
        self, item: HistoryItem, prompt: PiecewisePrompt, *, is_told: bool = True
    ) -> HistoryItem:
        """The item as ids, if it has audio. Args, Raises: as as_text."""
        if not any(isinstance(part, AudioPart) for part in item.parts):
            return item
        ids: list[int] = []
        for part in item.parts:
            if isinstance(part, AudioPart):
                ids += await self._heard_in(part.pcm, is_told)
            elif isinstance(part, TextPart):
                ids += prompt.words(part.text)
        return replace(item, parts=(), token_ids=tuple(ids))


def _key(pcm: np.ndarray) -> bytes:
    return blake2b(pcm.tobytes(), digest_size=16).digest()
