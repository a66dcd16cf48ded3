"""Words of mathematical signs, arrows and other symbols, and of Greek letters.

In: text without markdown and LaTeX. Out: the same with words; digits as they are.
"""

import re
import unicodedata
from collections.abc import Callable

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUPERSCRIPT = re.compile(r"(?<=[\w)\]])[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_VULGAR = re.compile(r"[¼½¾⅐-⅞↉]")
_SIGNS = {
    "×": "times", "÷": "divided by", "±": "plus or minus", "≤": "less than or equal to",
    "≥": "greater than or equal to", "≠": "not equal to", "≈": "approximately", "≡": "equals",
    "√": "square root of", "∞": "infinity", "∑": "sum of", "∏": "product of", "∫": "integral of",
    "∂": "partial", "∈": "in", "∉": "not in", "∪": "union", "∩": "intersection", "⊂": "subset of",
    "→": "to", "⇒": "implies", "⟶": "to", "↔": "to", "∴": "therefore", "π": "pi", "−": "minus",
    "∆": "delta", "§": "section", "¶": "paragraph",
    "⋅": "times", "∝": "proportional to", "⇔": "if and only if", "∀": "for all", "∃": "there is",
}  # fmt: skip
_WAYS: dict[str, str] = {"<": " less than ", ">": " greater than "}
_ASCII: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # An argument belongs to its function; other brackets hold a remark, with pauses around it.
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]\+?(-?\d{1,3})(?![\w.]\w)"), r"\1 × 10^\2"),
    (re.compile(r"(?<![\w-])(A|B|C|D|O|AB)-(?=[\s.,;])"), r"\1 minus"),
    (re.compile(r"\b([a-zA-Z])['’′](?=\()"), r"\1 prime"),
    (re.compile(r"\b([a-zA-Z]|prime|sin|cos|tan|log|ln|exp)\(([\w ,+^]{1,12})\)"), r"\1 of \2 "),
    (re.compile(r"(?<=\d)!(?=\s[=+×])"), " factorial "),
    (re.compile(r"(?<=[^\W\d])–(?=[^\W\d])|(?<=\d)–(?=[^\W\d])"), " to "),
    (re.compile(r"\|([^|\n]{1,24})\|(?=\s*[<>=≤≥+])"), r" absolute value of \1 "),
    (
        re.compile(
            r"(?<![\w^.=+*/-])(?<![=+×*/] )(\d+(?:\.\d+)?) - (?=\d+(?:\.\d+)?(?!\w|\s?[-+×÷*/=^]))"
        ),
        r"\1 to ",
    ),
    (re.compile(r"(?<![\w'-])([aA])-([zZ])(?![\w'-])"), r"\1 to \2"),
    (re.compile(r"(?<![\w'-])([a-z])-([a-z])(?![\w'-])"), r"\1 minus \2"),
    (re.compile(r"\b([A-Z]{1,3})&([A-Z]{1,3})\b"), lambda found: _spelled_pair(found)),
    (re.compile(r"<=>|<->"), " to "),
    (re.compile(r"[-=]{1,2}>"), " → "),
    (re.compile(r"!=="), " ≠ "),
    (re.compile(r"!=(?=\s?\w)"), " ≠ "),
    (re.compile(r"<=(?=\s?\w)"), " ≤ "),
    (re.compile(r">=(?=\s?\w)"), " ≥ "),
    (re.compile(r"={2,3}"), " equals "),
    (re.compile(r"(?<=[\w)]) ?< ?(?=[\w(])"), " less than "),
    (re.compile(r"(?<=[\w)]) ?> ?(?=[\w(])"), " greater than "),
    (re.compile(r"(?<!\S)[<>](?=\s?\d)"), lambda found: _WAYS[found[0]]),
    (re.compile(r"\+/-|\+-"), " ± "),
    (re.compile(r"(?<=[\w)!%]) {0,2}= ?(?=\S)|(?<=\s)=(?=\s)"), " equals "),
    (re.compile(r"(?<=[\w)]) {0,2}\+ ?(?=[\w(.$])"), " plus "),
    (re.compile(r"(?<=[\d)]) - (?=[\w(])|(?<=[\w)]) {1,2}- (?=\d)|(?<=\b[a-z]) - (?=[a-z]\b)"),
     " minus "),
    (re.compile(r"(?<=[\d)]) / (?=[\w(])|(?<=\)) ?/ ?(?=[\w(])"), " divided by "),
    (re.compile(r"\^\(([^()]*)\)"), r"^\1 "),
    (re.compile(r"\^(?:2\b|2(?=[a-z]))"), " squared "),
    (re.compile(r"\^3\b"), " cubed "),
    (re.compile(r"\^-"), " to the power of minus "),
    (re.compile(r"(?<=[\w)])\^(?=\w)"), " to the power of "),
    (re.compile(r"&"), " and "),
)  # fmt: skip
_SIGN = re.compile("|".join(_SIGNS))
# One Greek letter is a name of a quantity; a word of them is of another language.
_GREEK = re.compile(r"(?<![Ͱ-Ͽἀ-῿])[Α-Ωα-ω](?![Ͱ-Ͽἀ-῿])")
# An arrow at the start of a line is a bullet.
_ARROW_START = re.compile(r"^\s*[→⇒➜➔►▶]+|(?<=[.!?:] )[→⇒➜➔►▶]+")


def normal(text: str) -> str:
    """Unicode's compatible characters, where they mean the same when spoken."""
    text = _SUPERSCRIPT.sub(lambda found: "^" + found[0].translate(_SUPERSCRIPTS) + " ", text)
    text = _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]) + " ", text)
    text = re.sub("[™®©℠]", "", text)
    text = unicodedata.normalize("NFKC", text.replace("№", " number "))
    return "".join(_ascii_digit(char) for char in text)


def _ascii_digit(char: str) -> str:
    if char.isascii():
        return char
    value = unicodedata.decimal(char, None)
    return char if value is None else str(value)


def without_signs(text: str, *, greek: bool) -> str:
    """The text with words for its signs.

    Args:
        greek: single Greek letters too; False for a voice that speaks Greek.
    """
    text = _ARROW_START.sub(" ", text)
    for pattern, replacement in _ASCII:
        text = pattern.sub(replacement, text)
    text = _SIGN.sub(lambda found: f" {_SIGNS[found[0]]} ", text)
    return _GREEK.sub(_letter, text) if greek else text


def _letter(found: re.Match[str]) -> str:
    return (
        " " + unicodedata.name(found[0]).rpartition(" ")[2].lower().replace("lamda", "lambda") + " "
    )


def _spelled_pair(found: re.Match[str]) -> str:
    return f" {' '.join(found[1])} and {' '.join(found[2])} "
