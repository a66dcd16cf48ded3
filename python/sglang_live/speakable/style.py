"""What a voice can speak: letters of some scripts, spaces and basic punctuation.

In: text in which figures and symbols are words already. Out: only what can be spoken, and the
number of letters that were left out.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

PUNCTUATION = ".,!?;:"
_FIGURES = frozenset("0123456789%$€£+=°")
_ASIAN = str.maketrans("。，、！？；：।؟،؛", ".,,!?;:.?,;")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStyle:
    """
    scripts: whose letters it speaks, by the first word of their Unicode names.
    folds: Latin letters lose their diacritics, and those that are none of ASCII are left out.
    english: figures, signs, abbreviations and names become English words. Otherwise figures stay,
        for a voice that reads them in its own language.
    says_code, says_table: words in place of a fenced code block and of a table, so that a
        listener learns of it, also where the text has nothing else.
    """

    scripts: frozenset[str] = frozenset(("LATIN",))
    folds: bool = False
    english: bool = True
    says_code: str = "The code is in the text."
    says_table: str = "The table is in the text."


def is_speakable(text: str) -> bool:
    """Whether there is a letter or a digit: no other character has a sound of its own."""
    return any(unicodedata.category(char)[0] in "LN" for char in text)


@lru_cache(maxsize=4096)
def script_of(char: str) -> str:
    """The first word of a letter's or mark's name, empty for any other character."""
    if unicodedata.category(char)[0] not in "LM":
        return ""
    return unicodedata.name(char, "UNNAMED").partition(" ")[0]


def fold(text: str) -> str:
    """Latin letters without their diacritics; others as they are."""
    folded = (
        unicodedata.normalize("NFD", char)[0] if script_of(char) == "LATIN" else char
        for char in text
    )
    return "".join(folded).translate(_WITHOUT_DECOMPOSITION)


_WITHOUT_DECOMPOSITION = str.maketrans(
    {"ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O", "đ": "d"}
    | {"Đ": "D", "ł": "l", "Ł": "L", "ð": "d", "Ð": "D", "þ": "th", "Þ": "Th", "ı": "i"}
)


def filtered(text: str, style: SpeechStyle) -> tuple[str, int]:
    """The characters that the voice can speak; the number of letters that it cannot."""
    kept: list[str] = []
    n_unspeakable = 0
    for char in text.translate(_ASIAN):
        if not style.english and char in _FIGURES:
            kept.append(char)
        elif char.isascii():
            spoken = char.isalpha() or char in PUNCTUATION or char in " '-"
            kept.append(char if spoken else " ")
        elif (script := script_of(char)) in style.scripts and not (
            style.folds and script == "LATIN"
        ):
            kept.append(char)
        elif script != "COMBINING":
            # A mark above a letter is left out without a gap in its word.
            kept.append(" ")
            n_unspeakable += bool(script) and not unicodedata.category(char).startswith("M")
    return "".join(kept), n_unspeakable


_TIDY = (
    # Hyphens and apostrophes are parts of words only.
    (re.compile(r"(?<!\w)['-]+|-+(?!\w)|'+(?=[^\w\s])|(?<=-)[-']+|(?<=')[-']+"), " "),
    (re.compile(r"(?<![sS])'(?!\w)"), ""),
    (re.compile(r"[ \t\n]+"), " "),
    # Marks stand behind a word, one at a time: the strongest of several.
    (re.compile(r"\s+(?=[.,!?;:])"), ""),
    (re.compile(r"[.,!?;:]*\?[.,!?;:]*"), "?"),
    (re.compile(r"[.,!;:]*![.,!;:]*"), "!"),
    (re.compile(r"[.,;:]*\.[.,;:]*"), "."),
    (re.compile(r"[,;:]*([;:])[,;:]*"), r"\1"),
    (re.compile(r",,+"), ","),
    (re.compile(r"(?<=[.,!?;:])(?=[^\W\d])"), " "),
    (re.compile(r"^[.,!?;:\s'-]+|\s+$"), ""),
)


def tidied(text: str, *, closes: bool) -> str:
    """Spaces and punctuation as in prose; with closes, a mark at the end."""
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    if not closes or not text or text[-1] in ".!?":
        return text
    return text.rstrip(",;: ") + "."
