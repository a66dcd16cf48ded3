"""A text to be read aloud, in pieces of a few sentences, and how long each may take.

In: the text. Out: pieces, which joined with a space are the text; seconds.
A talker has learnt to end replies of some length: a page in one piece may never end.
"""

import re
import unicodedata

MAX_PIECE_CHARACTERS = 300
# Readers on board: 15 recordings of 10 speakers, 1,258 characters in 88.9 s. Digits, signs and wide
# characters are syllables or words, at some 4 a second.
_LETTER_S = 0.071
_SYLLABLE_S = 0.25
# The slowest of those recordings takes 2.5 times the mean, for 9 characters; the demo model's voice
# 1.9 times, always.
_GENEROSITY = 4.0
_BREATH_S = 4.0

_SENTENCE_ENDS = re.compile(r"(?<=[.!?…:;])\s+|(?<=[。！？；])\s*|\n+")
_PHRASE_ENDS = re.compile(r"(?<=[,、，–—)])\s*(?=\S)")
_WORD_ENDS = re.compile(r"\s+")


def pieces_of(text: str) -> list[str]:
    """At least one; a short text is the only one, as it stands."""
    if len(text) <= MAX_PIECE_CHARACTERS:
        return [text]
    return [piece for piece in _packed(_sentences(text)) if piece]


def longest_s(text: str) -> float:
    """What reading the text aloud may take at most."""
    usual_s = sum(_seconds(character) for character in text)
    return _BREATH_S + _GENEROSITY * usual_s


def _seconds(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    is_letter = character.isalpha() or character.isspace() or character in ".,;:!?'\"-()"
    wide = unicodedata.east_asian_width(character) in ("W", "F")
    return _LETTER_S if is_letter and not wide else _SYLLABLE_S


def _sentences(text: str) -> list[str]:
    """The parts to be packed, none longer than a piece may be."""
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
    """What has no place to be divided at, divided all the same, but not within a character."""
    found = []
    while len(part) > MAX_PIECE_CHARACTERS:
        at = MAX_PIECE_CHARACTERS
        while at > MAX_PIECE_CHARACTERS // 2 and unicodedata.combining(part[at]):
            at -= 1
        found.append(part[:at])
        part = part[at:]
    return [*found, part]
