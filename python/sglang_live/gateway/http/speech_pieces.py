"""Split of a text into pieces of a few sentences, and the longest duration of their speech.

In: a text to speak. Out: its pieces, which joined with spaces are the text; seconds.
A talker is trained on responses of limited length: the speech of a whole page may not end.
"""

import re
import unicodedata

import numpy as np

from sglang_live.core import OUTPUT_RATE_HZ

MAX_PIECE_CHARACTERS = 300
# Mean of 15 recordings of 10 speakers: 1,258 characters in 88.9 s. A digit, sign or wide character
# is spoken as a syllable or word, about 4 per second.
_LETTER_S = 0.071
_SYLLABLE_S = 0.25
# The slowest of those recordings takes 2.5 times the mean, for 9 characters; the demo model's voice
# always takes 1.9 times the mean.
_TOLERANCE = 4.0
_PAUSES_S = 4.0

_SENTENCE_ENDS = re.compile(r"(?<=[.!?…:;])\s+|(?<=[。！？；])\s*|\n+")
_PHRASE_ENDS = re.compile(r"(?<=[,、，–—)])\s*(?=\S)")
_WORD_ENDS = re.compile(r"\s+")


def pieces_of(text: str) -> list[str]:
    """The pieces, at least one. A short text is one piece, unchanged."""
    if len(text) <= MAX_PIECE_CHARACTERS:
        return [text]
    return [piece for piece in _packed(_sentences(text)) if piece]


def longest_s(text: str) -> float:
    """The longest duration of the text's speech, in seconds."""
    mean_s = sum(_seconds(character) for character in text)
    return _PAUSES_S + _TOLERANCE * mean_s


def _seconds(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    is_letter = character.isalpha() or character.isspace() or character in ".,;:!?'\"-()"
    wide = unicodedata.east_asian_width(character) in ("W", "F")
    return _LETTER_S if is_letter and not wide else _SYLLABLE_S


def _sentences(text: str) -> list[str]:
    """Parts of the text, none longer than a piece."""
    parts = [text.strip()]
    for ends in (_SENTENCE_ENDS, _PHRASE_ENDS, _WORD_ENDS):
        parts = [
            part
            for whole in parts
            for part in (ends.split(whole) if len(whole) > MAX_PIECE_CHARACTERS else [whole])
        ]
    return [part for whole in parts for part in _chopped(whole)]


def _packed(parts: list[str]) -> list[str]:
    pieces = [""]
    for part in parts:
        longer = f"{pieces[-1]} {part}".strip()
        if len(longer) <= MAX_PIECE_CHARACTERS:
            pieces[-1] = longer
        else:
            pieces.append(part)
    return pieces


def _chopped(part: str) -> list[str]:
    """Slices of a part without sentence, phrase or word ends; none divides a combined character."""
    found = []
    while len(part) > MAX_PIECE_CHARACTERS:
        at = MAX_PIECE_CHARACTERS
        while at > MAX_PIECE_CHARACTERS // 2 and unicodedata.combining(part[at]):
            at -= 1
        found.append(part[:at])
        part = part[at:]
    return [*found, part]


# --- fades at the joints of pieces of speech, against clicks ---
# In and out: int16 little-endian at OUTPUT_RATE_HZ. Owner: one Fades per piece.


# 5 ms: long enough to remove a click, shorter than a phoneme.
_RAMP_SAMPLES = OUTPUT_RATE_HZ // 200
_RAMP_BYTES = 2 * _RAMP_SAMPLES


class Fades:
    """Fades of one piece. fades_in, fades_out: whether another piece comes before it, after it."""

    def __init__(self, *, fades_in: bool, fades_out: bool):
        self._fades_in = fades_in
        self._fades_out = fades_out
        self._held = b""

    def push(self, pcm: bytes) -> bytes:
        """Returns the audio that is ready. A piece that fades out keeps 5 ms until finish()."""
        self._held += pcm
        if self._fades_in:
            if len(self._held) < _RAMP_BYTES:
                return b""
            self._fade_in()
        n_ready = len(self._held) - (_RAMP_BYTES if self._fades_out else 0)
        ready, self._held = self._held[: max(0, n_ready)], self._held[max(0, n_ready) :]
        return ready

    def finish(self) -> bytes:
        if self._fades_in:
            self._fade_in()
        rest, self._held = self._held, b""
        return _ramped(rest, up=False) if self._fades_out else rest

    def _fade_in(self) -> None:
        self._fades_in = False
        self._held = _ramped(self._held[:_RAMP_BYTES], up=True) + self._held[_RAMP_BYTES:]


def _ramped(pcm: bytes, *, up: bool) -> bytes:
    samples = np.frombuffer(pcm, "<i2")
    gains = np.linspace(0.0, 1.0, len(samples))
    return np.rint(samples * (gains if up else gains[::-1])).astype("<i2").tobytes()
