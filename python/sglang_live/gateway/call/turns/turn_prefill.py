"""Turn prefill: complete chunks of an utterance are prefilled while the user still speaks.

An encoder hears chunks of one length. A recogniser hears words, so that its chunks end in pauses:
the last one is recognised during the silence that ends the turn.
Before the first chunk comes the preheat: the conversation alone, in case its KV is lost (LiveServe,
arXiv 2606.22983, section 3).
In: the utterance's audio as it grows, its pauses. Out: its chunks, as messages for the model's
session.
Owner: one TurnPrefill per connection. Once a chunk is prefilled its limits and its key stay as
they are: the message of the whole utterance must begin with the same chunks. A recogniser needs
context and whole words, so that a chunk is given up if the turn does not end in its pause, and the
chunk or the pause is short.
"""

from dataclasses import replace

import numpy as np

from sglang_live.core import INPUT_RATE_HZ, AudioPart, HistoryItem
from sglang_live.gateway.call.responses.speculation import Utterance
from sglang_live.gateway.call.responses.turn_runner import TurnRunner
from sglang_live.gateway.call.settings import SessionConfig, TurnConfig
from sglang_live.ids import new_id
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.turn_end import PAUSE_MS

# The least audio left for the last chunk: the encoder makes no token of a few milliseconds.
_MIN_REST_SAMPLES = INPUT_RATE_HZ // 4
# Before a pause in which the turn goes on; about a clause.
_MIN_KEPT_SAMPLES = 3 * INPUT_RATE_HZ
# A chunk as long as this is kept before any pause: recognised once more in each, it would cost more
# than a word that the pause may divide.
_LONG_SAMPLES = 8 * INPUT_RATE_HZ


class TurnPrefill:
    def __init__(self, config: TurnConfig, turn_runner: TurnRunner) -> None:
        """config: says whether there is a preheat, and whether chunks have a fixed length or end at
        pauses."""
        # 0: no fixed length.
        self._chunk_samples = round((config.turn_prefill_s or 0) * INPUT_RATE_HZ)
        self._preheats = config.preheat
        self._at_pauses = config.prefills_at_pauses
        self._turn_runner = turn_runner
        self._min_rest = 0 if self._at_pauses else _MIN_REST_SAMPLES
        self.reset()

    def reset(self) -> None:
        """The utterance is over; the next one starts without chunks."""
        self._chunks: list[HistoryItem] = []
        self._ends: list[int] = []  # of the chunks, in samples from the utterance's beginning
        self._n_prefilled = 0
        self._in_pause = False  # nothing has been said since the last chunk
        self._silence_ms = 0
        self._preheat_due = False

    def begin(self) -> None:
        """An utterance begins."""
        self.reset()
        self._preheat_due = self._preheats

    def grow(
        self, config: SessionConfig, buffer: InputBuffer, start_sample: int, silence_ms: int = 0
    ) -> None:
        """The utterance, which began at start_sample, goes on up to the end of the buffer.

        silence_ms: for how long the user has been silent.
        """
        self._silence_ms = silence_ms
        if self._preheat_due and self._turn_runner.prefill_turn(config, ()):
            self._preheat_due = False
        while self._chunk_samples:
            end = self._end + self._chunk_samples
            if buffer.end_sample - start_sample < end + _MIN_REST_SAMPLES:
                break
            self._cut(buffer, start_sample, end)
        self._prefill_new(config)

    def pause(
        self, config: SessionConfig, buffer: InputBuffer, start_sample: int, pause_sample: int
    ) -> None:
        """The user is silent from pause_sample on; the turn may be over."""
        if self._at_pauses and pause_sample - start_sample > self._end:
            self._cut(buffer, start_sample, pause_sample - start_sample)
            self._in_pause = True
            self._prefill_new(config)

    def resume(self, silence_ms: int) -> None:
        """The user speaks again, after this silence."""
        if not self._in_pause:
            return
        n_kept = self._n_kept(silence_ms)
        self._in_pause = False
        del self._chunks[n_kept:], self._ends[n_kept:]
        self._n_prefilled = min(self._n_prefilled, n_kept)

    @property
    def final_clips(self) -> tuple[AudioPart, ...]:
        """The audio of the prefilled chunks that are not given up if the user speaks on; () if
        chunks do not end at pauses."""
        if not self._at_pauses:
            return ()
        final = self._chunks[: min(self._n_prefilled, self._n_kept(self._silence_ms))]
        return tuple(part for chunk in final for part in chunk.parts if isinstance(part, AudioPart))

    def finish(self, audio: AudioPart) -> Utterance:
        """Split the whole utterance: prefilled chunks and the rest; () if none was prefilled."""
        utterance = self._split(audio)
        self.reset()
        return utterance

    def so_far(self, audio: AudioPart) -> Utterance:
        """Split an utterance that may go on; one message if no chunk was prefilled."""
        return self._split(audio) or (_message(audio, opens=True, closes=True),)

    @property
    def _end(self) -> int:
        """End of the last chunk, in samples from the utterance's beginning."""
        return self._ends[-1] if self._ends else 0

    def _n_kept(self, silence_ms: int) -> int:
        """Chunks that are kept if the user speaks on after this silence."""
        begin = self._ends[-2] if len(self._ends) > 1 else 0
        least = _MIN_KEPT_SAMPLES if silence_ms >= PAUSE_MS else _LONG_SAMPLES
        return len(self._chunks) - (self._in_pause and self._end - begin < least)

    def _cut(self, buffer: InputBuffer, start_sample: int, end: int) -> None:
        audio = AudioPart(buffer.peek(start_sample + self._end, start_sample + end))
        self._chunks.append(_message(audio, opens=not self._chunks, closes=False))
        self._ends.append(end)

    def _prefill_new(self, config: SessionConfig) -> None:
        n, chunks = len(self._chunks), tuple(self._chunks)
        if n > self._n_prefilled and self._turn_runner.prefill_turn(config, chunks):
            self._n_prefilled = n

    def _split(self, audio: AudioPart) -> Utterance:
        ends = [
            end for end in self._ends[: self._n_prefilled] if end + self._min_rest <= len(audio.pcm)
        ]
        if not ends:
            return ()
        *parts, rest = np.split(audio.pcm, ends)
        # Views of the whole: the audio of a long turn is not kept twice.
        chunks = [
            replace(chunk, parts=(AudioPart(pcm),))
            for chunk, pcm in zip(self._chunks, parts, strict=False)
        ]
        is_silence = self._in_pause and len(ends) == len(self._chunks)
        last = None if is_silence else AudioPart(rest)
        return (*chunks, _message(last, opens=False, closes=True))


def _message(audio: AudioPart | None, *, opens: bool, closes: bool) -> HistoryItem:
    parts = () if audio is None else (audio,)
    return HistoryItem(key=new_id("key"), role="user", parts=parts, opens=opens, closes=closes)
