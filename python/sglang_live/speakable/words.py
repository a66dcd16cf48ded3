"""Words for speech: English text of a response, in markdown, as it is said aloud.

In: a piece of a response. Out: letters that the voice speaks, spaces and basic punctuation. Pure.
The order of the steps matters: each one leaves words where it found what it knows, and digits and
signs where it did not.
"""

import re
from dataclasses import dataclass

from sglang_live.speakable.figures import without_digits
from sglang_live.speakable.letters import (
    without_abbreviations,
    without_acronyms,
    without_number_signs,
    without_roman,
)
from sglang_live.speakable.markdown import plain
from sglang_live.speakable.maths import normal, without_signs
from sglang_live.speakable.moments import without_moments
from sglang_live.speakable.names import code_words, without_names
from sglang_live.speakable.style import SpeechStyle, filtered, fold, tidied

# No language writes words of this length; what has it is data.
MAX_WORD = 60
_DATA = re.compile(rf"[\w+/=%&?.:-]{{{MAX_WORD},}}", re.ASCII)
_EMOTICON = re.compile(
    r"(?<!\S)(?:[<>]?[:;=8xX][-'^o]?[()\[\]DPpOo/\\|3*]+|[(\[][-']?[:;=]|<3+|\^[_.-]?\^|:'\(|[oO]_[oO]|"
    r"-_+-|¯\\_\(ツ\)_/¯)(?=[\s.,!?]|$)"
)
# Removing marks can join what then has a meaning, as in `D**r**. X`: a text in which words were
# found is read again, until nothing is left to be found.
_MAX_PASSES = 6

_QUOTES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": " ", "´": "'", "\u00ad": None})
_PAUSES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[\u200b-\u200f\u2060\ufeff]"), ""),
    (re.compile(r"\.\s?\.\s?\.[.\s]*"), ", "),
    (re.compile(r"\s+[-–—]+(?:\s+|$)|[—―]|(?<=\D)–(?=\D)|--+"), ", "),
    (re.compile(r"\s[(\[{]"), ", "),
    (re.compile(r"[)\]}](?=\s+\w)"), ","),
    (re.compile(r"\s\|\s"), ", "),
    (re.compile(r"(?<=[^\W\d_]):(?=[^\W\d_])"), " "),
)
_PLURALS = re.compile(r"(?<=[^\W_])\(e?s\)")
_DOT = re.compile(r"(?<=[^\W\d_]{2})\.(?=[a-z])")


@dataclass(frozen=True, slots=True)
class Wording:
    """
    words: letters, spaces and . , ! ? : - ' only.
    n_unspeakable: letters that were left out, because the voice does not speak their script.
    """

    words: str
    n_unspeakable: int


def wording_of(
    text: str, style: SpeechStyle | None = None, *, starts_line: bool = True, closes: bool = True
) -> Wording:
    """
    Args:
        starts_line: marks at the start of the text are those of a line, as of a list or heading.
        closes: a sentence ends with the text, though it may have no mark for it.
    """
    style = style or SpeechStyle()
    words, n_unspeakable = _pass(text, style, starts_line=starts_line, closes=closes)
    for _ in range(_MAX_PASSES):
        again, _ = _pass(words, style, starts_line=starts_line, closes=closes)
        if again == words:
            break
        words = again
    return Wording(words, n_unspeakable)


def _pass(text: str, style: SpeechStyle, *, starts_line: bool, closes: bool) -> tuple[str, int]:
    text = plain(text, starts_line=starts_line, say_code=code_words)
    text = normal(_EMOTICON.sub(" ", text)).translate(_QUOTES)
    if style.english:
        text = without_names(text)
    text = _DATA.sub(" ", text)
    if style.english:
        text = _english(text, greek="GREEK" not in style.scripts)
    for pattern, replacement in _PAUSES:
        text = pattern.sub(replacement, text)
    if style.folds:
        text = fold(text)
    kept, n_unspeakable = filtered(text, style)
    return tidied(kept, closes=closes), n_unspeakable


def _english(text: str, *, greek: bool) -> str:
    """English words for figures, signs and abbreviations."""
    text = without_number_signs(without_roman(text))
    text = without_moments(text)
    text = without_signs(text, greek=greek)
    text = without_digits(text)
    text = without_acronyms(without_abbreviations(text))
    text = _PLURALS.sub("s", text)
    return _DOT.sub(" dot ", text)
