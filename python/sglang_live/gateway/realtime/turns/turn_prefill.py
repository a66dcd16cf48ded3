"""Turn prefill: complete chunks of an utterance are prefilled while the user still speaks.

Before the first chunk comes the preheat: the conversation alone, in case its KV is lost (LiveServe,
arXiv 2606.22983, section 3).
In: the utterance's audio as it grows. Out: its chunks, as messages for the model's session.
Owner: one TurnPrefill per connection. Once a chunk is prefilled its limits and its key stay as
they are: the message of the whole utterance must begin with the same chunks.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sglang_live.core import INPUT_RATE_HZ, AudioPart, HistoryItem
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime.responses.speculation import Utterance
from sglang_live.interaction.input_buffer import InputBuffer

# The least audio left for the last chunk: the encoder makes no token of a few milliseconds.
_MIN_REST_SAMPLES = INPUT_RATE_HZ // 4


class TurnPrefill:
    """
    Args:
        chunk_s: length of a chunk; 0: nothing is prefilled before the utterance ends.
        prefill: starts the prefill of these chunks; returns False if it refuses for now. Without
            chunks: the preheat.
        preheats: whether there is a preheat.
    """

    def __init__(
        self, chunk_s: float, prefill: Callable[[Utterance], bool], preheats: bool = False
    ) -> None:
        self._chunk_samples = round(chunk_s * INPUT_RATE_HZ)
        self._prefill, self._preheats = prefill, preheats
        self._preheat_due = False
        self._chunks: list[HistoryItem] = []
        self._n_prefilled = 0

    def reset(self) -> None:
        """The utterance is over; the next one starts without chunks."""
        self._chunks = []
        self._n_prefilled = 0
        self._preheat_due = False

    def begin(self) -> None:
        """An utterance begins."""
        self.reset()
        self._preheat_due = self._preheats

    def grow(self, buffer: InputBuffer, start_sample: int) -> None:
        """The utterance, which began at start_sample, goes on up to the end of the buffer."""
        if self._preheat_due and self._prefill(()):
            self._preheat_due = False
        if not self._chunk_samples:
            return
        while True:
            start = start_sample + len(self._chunks) * self._chunk_samples
            if buffer.end_sample - start < self._chunk_samples + _MIN_REST_SAMPLES:
                break
            audio = AudioPart(buffer.peek(start, start + self._chunk_samples))
            self._chunks.append(_message(audio, opens=not self._chunks, closes=False))
        if len(self._chunks) > self._n_prefilled and self._prefill(tuple(self._chunks)):
            self._n_prefilled = len(self._chunks)

    def finish(self, audio: AudioPart) -> Utterance:
        """Split the whole utterance: prefilled chunks and the rest; () if none was prefilled."""
        utterance = self._split(audio)
        self.reset()
        return utterance

    def so_far(self, audio: AudioPart) -> Utterance:
        """Split an utterance that may go on; one message if no chunk was prefilled."""
        return self._split(audio) or (_message(audio, opens=True, closes=True),)

    def _split(self, audio: AudioPart) -> Utterance:
        size = self._chunk_samples
        n_within = max(0, len(audio.pcm) - _MIN_REST_SAMPLES) // size if size else 0
        prefilled = self._chunks[: min(self._n_prefilled, n_within)]
        if not prefilled:
            return ()
        *parts, rest = np.split(audio.pcm, [size * (i + 1) for i in range(len(prefilled))])
        # Views of the whole: the audio of a long turn is not kept twice.
        chunks = [
            replace(chunk, parts=(AudioPart(pcm),))
            for chunk, pcm in zip(prefilled, parts, strict=True)
        ]
        return (*chunks, _message(AudioPart(rest), opens=False, closes=True))


def _message(audio: AudioPart, *, opens: bool, closes: bool) -> HistoryItem:
    return HistoryItem(key=new_id("key"), role="user", parts=(audio,), opens=opens, closes=closes)
