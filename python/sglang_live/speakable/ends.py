"""Where a text may be cut: how strong the boundary between two words is.

In: what stands before a gap, and the first character behind it. Out: a Strength. Pure.
"""

import re
from enum import IntEnum

from sglang_live.speakable.letters import NUMBERED, TITLES
from sglang_live.speakable.moments import SHORT_MONTHS
from sglang_live.speakable.numbers import listed


class Strength(IntEnum):
    NONE = 0  # the two belong together
    WORD = 1
    CLAUSE = 2
    SENTENCE = 3


CLOSERS = "\"'”’»)]}*_~`"
# Enough for any word that matters here.
LOOK_BEHIND = 48

# After these a sentence goes on, whatever follows.
_BEFORE_NAMES = frozenset(map(str.lower, TITLES)) | {
    *listed("vs cf ca approx est al incl esp resp viz eg ie messrs mme mlle")
}
# After these a number goes on: No. 5, Fig. 3, pp. 10, Jan. 5.
_BEFORE_NUMBERS = frozenset(map(str.lower, NUMBERED.keys() | SHORT_MONTHS.keys() - {"May"})) | {
    *listed("eqs art op tab ex nr")
}
# Of the form of initials, but often the last word of a sentence.
_LAST_WORDS = frozenset(("a.m", "p.m", "i"))
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_LAST_TOKEN = re.compile(r"[^\s(\[{\"'“‘«*_`—–/]*$")
_MARKER = re.compile(r"[\s>]*(?:\d{1,3}[.)]|[-*+•‣◦▪–]|#{1,6}|[-*+] \[[ xX]\])?[\s>]*")
_ASIAN_SENTENCE = "。！？।؟"
_ASIAN_CLAUSE = "，、；：،؛"


def is_marker(line: str) -> bool:
    """Whether the line so far is no more than indentation, quotation and list marks."""
    return _MARKER.fullmatch(line) is not None


def _after_period(before: str, following: str) -> Strength:
    if before.endswith(".."):
        return Strength.CLAUSE
    found = _LAST_TOKEN.search(before[:-1])
    token = found[0].lower() if found else ""
    if following.islower() or token in _BEFORE_NAMES:
        return Strength.WORD
    if token in _BEFORE_NUMBERS and following.isdigit():
        return Strength.NONE
    if token not in _LAST_WORDS and _INITIALS.fullmatch(token):
        return Strength.WORD
    return Strength.SENTENCE


def strength(before: str, following: str) -> Strength:
    """
    Args:
        before: the end of what stands before the gap, without whitespace at its end.
        following: the first character behind the gap.
    """
    open_end = before.rstrip(CLOSERS) or before
    last = open_end[-1:]
    if last == ".":
        return _after_period(open_end, following)
    if last and last in "!?":
        return Strength.CLAUSE if following.islower() else Strength.SENTENCE
    if last == "," and following.isdigit() and open_end[-2:-1].isdigit():
        return Strength.NONE  # May 6, 2024
    if last and last in ",;:—…":
        return Strength.CLAUSE
    if open_end.endswith((" -", " –")):
        return Strength.NONE if following.isdigit() else Strength.CLAUSE
    return strength_without_gap(open_end, following) or Strength.WORD


def strength_without_gap(before: str, following: str) -> Strength:
    """The boundary where no whitespace is: after a long dash, and in scripts without spaces."""
    last = before.rstrip(CLOSERS)[-1:]
    if not last or following in CLOSERS or following in ".,;:!?":
        return Strength.NONE
    if last in _ASIAN_SENTENCE:
        return Strength.SENTENCE
    return Strength.CLAUSE if last in _ASIAN_CLAUSE or last == "—" else Strength.NONE


# Words before which a speaker may pause.
_PAUSE = re.compile(
    r"\s(?=(?:and|or|but|that|which|who|because|when|where|while|if|so|for|with|from|to|in|on|at|by|"
    r"as|about|into|between|than|is|are|was|were|can|will)\s)"
)


def best_pause(text: str, n_words: int) -> int:
    """The place in a text without clauses before which a speaker may pause; 0 if there is none.

    Args:
        n_words: fewest words before the pause.
    """
    places = [found.end() for found in _PAUSE.finditer(text)]
    return next((at for at in reversed(places) if len(text[:at].split()) >= n_words), 0)


def belongs_together(before: str, following: str) -> bool:
    """Whether two words may be one name or figure: World War II, five km, 3 million."""
    last = before.split()[-1] if before.strip() else ""
    if following.isdigit() or last[-1:].isdigit():
        return True
    return following.isupper() and last[:1].isupper()


def middle(text: str) -> int:
    """The place near the middle of two or more characters at which they are best divided."""
    half = len(text) // 2
    for pattern in (_AFTER_CLAUSE, _AFTER_GAP, _AFTER_MARK):
        places = [found.end() for found in pattern.finditer(text)]
        inner = [at for at in places if len(text) // 5 < at < len(text) - len(text) // 5]
        if inner:
            return min(inner, key=lambda at: abs(at - half))
    return half


_AFTER_CLAUSE = re.compile(r"[.,;:!?]\s+(?=\S)|\n+(?=\S)")
_AFTER_GAP = re.compile(r"\s+(?=\S)")
_AFTER_MARK = re.compile(r"[,;:/|=&_-]+(?=\w)")


def is_soft(before: str, line: str, following: str) -> bool:
    """Whether a single line break only wraps a sentence.

    Args:
        before: as for strength().
        line: the line that was broken, from its start.
        following: the first character of the next line.
    """
    if not following.islower() or not before or before[-1] in ".!?:;|":
        return False
    return not line.lstrip().startswith("#")
