"""The sound of one piece of text: without the silence around it, and as the continuation of its
first words, which may sound before the voice has the rest.

In: what a voice has read. Out: PCM at OUTPUT_RATE_HZ, and the ends of its words.

A voice shapes the end of what it reads. So the last one of the first words is read, but not sent:
it comes from the sound of the whole piece, as all after it.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import soxr

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.models.speech import Speech, SpokenWord

Pcm = npt.NDArray[np.int16]

# Silence that is left at the beginning and at the end of a piece; voices add more. Quieter than a
# hundredth of the loudest sample is silent.
_LEAD_S, _TAIL_S, _SILENT = 0.03, 0.2, 100
# Two sounds of the same words overlap for this long, and are moved against each other by up to a
# period of a deep voice, so that voiced sounds join in phase.
_OVERLAP = round(0.010 * OUTPUT_RATE_HZ)
_SEARCH = round(0.012 * OUTPUT_RATE_HZ)


@dataclass(frozen=True, slots=True, eq=False)
class PieceSound:
    """
    pcm: [n] int16 at OUTPUT_RATE_HZ.
    words: their ends in the piece's text, and in pcm.
    after: [m] what the voice read behind pcm; empty for a whole piece.
    """

    pcm: Pcm
    words: tuple[SpokenWord, ...]
    after: Pcm = field(default_factory=lambda: np.zeros(0, np.int16))

    @classmethod
    def of(cls, speech: Speech, rate_hz: int) -> "PieceSound":
        """rate_hz: of the speech."""
        whole = speech.pcm
        if rate_hz != OUTPUT_RATE_HZ:
            whole = soxr.resample(whole, rate_hz, OUTPUT_RATE_HZ)
        first, last = _sounding(whole)
        return cls(whole[first:last], _moved(speech.words, first, last - first))

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / OUTPUT_RATE_HZ

    def without_last_word(self) -> "PieceSound":
        """Needs two words at least."""
        words = self.words[:-1]
        end = round(words[-1].end_s * OUTPUT_RATE_HZ)
        return PieceSound(self.pcm[:end], words, self.pcm[end : end + _OVERLAP])

    def behind(self, begun: "PieceSound") -> "PieceSound":
        """What follows the first words of this piece.

        Args:
            begun: their sound, without_last_word().
        """
        n_begun = len(begun.words)
        if n_begun >= len(self.words):
            return PieceSound(self.pcm[:0], ())
        near = round(self.words[n_begun - 1].end_s * OUTPUT_RATE_HZ)
        begin = _most_alike(self.pcm, near, begun.after)
        pcm = self.pcm[begin:].copy()
        n = min(len(begun.after), len(pcm))
        rising = (np.arange(n) + 1) / (n + 1)
        pcm[:n] = np.rint(begun.after[:n] * (1 - rising) + pcm[:n] * rising).astype(np.int16)
        return PieceSound(pcm, _moved(self.words[n_begun:], begin, len(pcm)))


def _moved(words: tuple[SpokenWord, ...], begin: int, n_samples: int) -> tuple[SpokenWord, ...]:
    """The words in a part of their sound."""
    begin_s, end_s = begin / OUTPUT_RATE_HZ, n_samples / OUTPUT_RATE_HZ
    return tuple(SpokenWord(word.end, min(max(word.end_s - begin_s, 0.0), end_s)) for word in words)


def _sounding(pcm: Pcm) -> tuple[int, int]:
    """The samples of a piece without the silence around it; all of them if it is silent."""
    level = np.abs(pcm.astype(np.int32))
    loud = np.flatnonzero(level * _SILENT > level.max(initial=0))
    if not len(loud):
        return 0, len(pcm)
    first = int(loud[0]) - round(_LEAD_S * OUTPUT_RATE_HZ)
    last = int(loud[-1]) + 1 + round(_TAIL_S * OUTPUT_RATE_HZ)
    return max(0, first), min(len(pcm), last)


def _most_alike(pcm: Pcm, near: int, wanted: Pcm) -> int:
    """The sample near the given one from which on the sound is most like the wanted one."""
    first, last = max(0, near - _SEARCH), min(len(pcm) - len(wanted), near + _SEARCH)
    if last <= first or not wanted.any():
        return min(near, len(pcm))
    found, like = pcm[first : last + len(wanted)].astype(np.float64), wanted.astype(np.float64)
    energy = np.convolve(found**2, np.ones(len(like)), "valid")
    return first + int(np.argmax(np.correlate(found, like, "valid") / np.sqrt(energy + 1.0)))
