"""Speech of users as text, for a language model that only reads.

In: history items with audio. Out: the same items with the words in it. A worker thread recognises
one clip of a turn at a time, another one those that are only transcribed and may be long. A clip is
recognised once, unless a turn would wait for the other worker.
Owner: one Hearing per thinker stage of a family with a recogniser.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TypeVar

import numpy as np

from sglang_live.core import AudioPart, HeardToken, HistoryItem, TextPart
from sglang_live.errors import StageFailedError
from sglang_live.models.speech import DetailedRecogniser, Recogniser

log = logging.getLogger(__name__)

# Transcripts of clips, for the turn, its transcript for the client, and a retry.
_KEPT = 1024
_T = TypeVar("_T")


class Hearing:
    """
    Attributes:
        counts: clips that were recognised, for how long, and how many failed.
    """

    def __init__(self, recogniser: Recogniser):
        self._recogniser = recogniser
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="recogniser")
        self._patient_worker = ThreadPoolExecutor(1, thread_name_prefix="transcriber")
        self._told: OrderedDict[bytes, None] = OrderedDict()  # clips whose failure was told
        self._texts: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()
        self._patient: set[asyncio.Task[str]] = set()  # not done, of the other worker
        names = ("clips_recognised", "recognition_s", "recognitions_failed", "clips_given_up")
        self.counts = dict.fromkeys(names, 0.0)

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
            await self._words_of(part.pcm, is_told) if isinstance(part, AudioPart) else part.text
            for part in item.parts
            if isinstance(part, AudioPart | TextPart)  # the gateway refuses pictures
        ]
        words = " ".join(text for text in texts if text)
        if words and not item.opens:
            words = f" {words}"  # it continues the utterance
        return replace(item, parts=(TextPart(words),))

    async def _words_of(self, pcm: np.ndarray, is_told: bool) -> str:
        key = _key(pcm)
        if key in self._told:
            self.counts["clips_given_up"] += 1
            return ""
        try:
            return await self._text_of(pcm, self._worker)
        except StageFailedError:
            if is_told:
                self._told[key] = None
                while len(self._told) > _KEPT:
                    self._told.popitem(last=False)
            raise

    async def transcript_of(self, pcm: np.ndarray) -> str:
        """The words of a clip that no response waits for.

        Raises:
            StageFailedError: the recogniser failed.
        """
        return await self._text_of(pcm, self._patient_worker)

    async def detailed_transcript_of(
        self, pcm: np.ndarray, *, translates: bool
    ) -> list[HeardToken]:
        """The same, token by token. Raises as transcript_of."""
        assert isinstance(self._recogniser, DetailedRecogniser), "the gateway refuses the others"
        hear = partial(self._recogniser.transcribe_in_detail, translates=translates)
        return await self._counted(hear, pcm, self._patient_worker)

    async def _text_of(self, pcm: np.ndarray, worker: Executor) -> str:
        """The words of a clip: [n] int16, mono, at INPUT_RATE_HZ."""
        key = _key(pcm)
        task = self._texts.get(key)
        has_failed = task is not None and task.done() and (task.cancelled() or task.exception())
        may_be_late = worker is self._worker and task in self._patient
        if task is None or has_failed or may_be_late:
            task = self._texts[key] = asyncio.create_task(self._recognise(pcm, worker))
            if worker is self._patient_worker:
                self._patient.add(task)
                task.add_done_callback(self._patient.discard)
        self._texts.move_to_end(key)
        while len(self._texts) > _KEPT:
            self._texts.popitem(last=False)
        # A turn that is cancelled does not cancel the recognition: the next turn has the clip, too.
        return await asyncio.shield(task)

    async def _recognise(self, pcm: np.ndarray, worker: Executor) -> str:
        return await self._counted(self._recogniser.transcribe, pcm, worker)

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


def _key(pcm: np.ndarray) -> bytes:
    return blake2b(pcm.tobytes(), digest_size=16).digest()
