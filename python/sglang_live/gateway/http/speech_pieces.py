"""Split of a text into pieces of a few sentences, and the longest duration of their speech.

In: a text to speak. Out: its pieces, which joined with spaces are the text; seconds.
A talker is trained on responses of limited length: the speech of a whole page may not end.
"""

import re
import unicodedata

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
