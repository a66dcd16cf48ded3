"""A turn in pieces while it is spoken: what is complete can be taken in before the rest is said.

In: the turn's audio as it grows. Out: pieces of one message, for the model's session.
Owner: one UtterancePieces per connection. The pieces are cut once and for all: a session that has
taken one in must meet the same again, with the same key, in the whole message.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sglang_live.core import INPUT_RATE_HZ, AudioPart, HistoryItem
from sglang_live.gateway.ids import new_id
from sglang_live.interaction.input_buffer import InputBuffer

# What is left for the last piece, at the least: an encoder makes nothing of a few milliseconds.
_LEAST_REST = INPUT_RATE_HZ // 4

Pieces = tuple[HistoryItem, ...]


class UtterancePieces:
    """
    Args:
        piece_s: of how much speech each is; 0: nothing is taken in before its end.
        prefill_turn: asks for pieces to be taken in; False: not now.
    """

    def __init__(self, piece_s: float, prefill_turn: Callable[[Pieces], bool]):
        self._size = round(piece_s * INPUT_RATE_HZ)
        self._prefill_turn = prefill_turn
        self.forget()

    def forget(self) -> None:
        """The turn is over, or was none."""
        self._pieces: list[HistoryItem] = []
        self._n_prefilled = 0

    def grow(self, buffer: InputBuffer, start_sample: int) -> None:
        """The turn that began at start_sample goes on, up to the end of the buffer."""
        if not self._size:
            return
        while True:
            begin = start_sample + len(self._pieces) * self._size
            if buffer.end_sample - begin < self._size + _LEAST_REST:
                break
            audio = AudioPart(buffer.peek(begin, begin + self._size))
            self._pieces.append(_piece(audio, opens=not self._pieces, closes=False))
        if len(self._pieces) > self._n_prefilled and self._prefill_turn(tuple(self._pieces)):
            self._n_prefilled = len(self._pieces)

    def whole(self, audio: AudioPart) -> Pieces:
        """The turn's audio in pieces: those that were taken in, and the rest. () if none was."""
        pieces = self._split(audio)
        self.forget()
        return pieces

    def so_far(self, audio: AudioPart) -> Pieces:
        """The same if the turn should end here, but it may go on. One if none was taken in."""
        return self._split(audio) or (_piece(audio, opens=True, closes=True),)

    def _split(self, audio: AudioPart) -> Pieces:
        n_within = max(0, len(audio.pcm) - _LEAST_REST) // self._size if self._size else 0
        prefilled = self._pieces[: min(self._n_prefilled, n_within)]
        if not prefilled:
            return ()
        *parts, rest = np.split(audio.pcm, [self._size * (i + 1) for i in range(len(prefilled))])
        pieces = zip(prefilled, parts, strict=True)
        # Views of the whole: a long turn is not kept twice.
        known = [replace(piece, parts=(AudioPart(pcm),)) for piece, pcm in pieces]
        return (*known, _piece(AudioPart(rest), opens=False, closes=True))


def _piece(audio: AudioPart, *, opens: bool, closes: bool) -> HistoryItem:
    return HistoryItem(key=new_id("key"), role="user", parts=(audio,), opens=opens, closes=closes)
