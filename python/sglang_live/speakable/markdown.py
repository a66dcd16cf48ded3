"""Markdown of a growing text: which blocks are not spoken, and plain text of the others.

Lines takes one character after the other and tells when fenced code and rows of tables begin and
end. plain() takes a piece, whose marks need not be complete: marks, tags and targets of links are
removed, LaTeX becomes symbols and words, and line breaks ends of sentences. Pure.
"""

import html
import re
from collections.abc import Callable
from enum import Enum

from sglang_live.speakable.ends import is_soft
from sglang_live.speakable.numbers import listed

_PREFIX = re.compile(r"[\s>]*(?:(?:[-*+]|\d{1,3}[.)])\s+)?[\s>]*")
_MAX_PREFIX = 40
_FENCE = 3


class Block(Enum):
    TEXT = "text"
    CODE = "code"
    TABLE = "table"


class Lines:
    """
    Attributes:
        block: what the last character is part of. It becomes CODE with the last mark of a fence,
            `marks` characters after the block's begin, and TABLE with a row's first mark.
        marks: number of characters of the opening mark that were seen when the block began.
    """

    def __init__(self) -> None:
        self.block = Block.TEXT
        self.marks = 0
        self._prefix: str | None = ""  # of the line, while it may open a block
        self._fence = ""
        self._opening = False  # the fence's own line is not complete
        self._line = ""  # in code, the line's first characters

    def step(self, char: str) -> bool:
        """Take the next character; True if a skipped block ends behind it."""
        if self.block is Block.CODE:
            return self._in_code(char)
        if char == "\n":
            ended = self.block is Block.TABLE
            self.block = Block.TEXT
            self._prefix = ""
            self.marks = 0
            return ended
        if self._prefix is not None and self.block is Block.TEXT:
            self._at_start(char, self._prefix)
        return False

    def _at_start(self, char: str, prefix: str) -> None:
        if char in "`~" and (not self.marks or prefix[-1] == char):
            self.marks += 1
            self._prefix = prefix + char
            if self.marks == _FENCE:
                self.block = Block.CODE
                self._fence = char * _FENCE
                self._line = ""
                self._opening = True
        elif char == "|" and not self.marks:
            self.block = Block.TABLE
            self.marks = 1
        elif self.marks or len(prefix) >= _MAX_PREFIX:
            self._prefix = None
        else:
            grown = prefix + char
            opens = _PREFIX.fullmatch(grown) or is_growing_marker(grown)
            self._prefix = grown if opens else None

    def _in_code(self, char: str) -> bool:
        if char != "\n":
            if self._opening and not self._line and char == self._fence[0]:
                # A fence of more marks than this is closed by any that has as many.
                self._fence = (self._fence + char)[:_MAX_PREFIX]
                return False
            # A line that is longer than this closes no fence, and need not be kept.
            if len(self._line) <= _MAX_PREFIX:
                self._line += char
            return False
        line, self._line = self._line, ""
        if self._opening:
            self._opening = False
            # CommonMark: with a further backtick in its line it is inline code.
            closes = self._fence[0] == "`" and "`" in line
        else:
            mark = line.lstrip(" \t>").rstrip()
            closes = mark.startswith(self._fence) and not mark.strip(self._fence[0])
        if closes:
            self.block = Block.TEXT
            self._prefix = ""
            self.marks = 0
        return closes


def is_growing_marker(prefix: str) -> bool:
    """Whether a list mark may be complete with the next character."""
    return re.fullmatch(r"[\s>]*(?:[-*+]|\d{1,3}[.)]?)", prefix) is not None


_QUOTE = re.compile(r"^\s*(?:>\s?)+")
_RULE = re.compile(r"^\s*(?:([-*_=])(?:\s*\1){2,}|=+|\[[^\]\s]+\]:\s+\S.*|[\s|:-]*\|[\s|:-]*)\s*$")
_HEADING = re.compile(r"^\s*#{1,6}(?:\s+|$)(.*?)\s*#*$")
_BULLET = re.compile(r"^\s*[-*+•‣◦▪–]\s+(?:\[[ xX]\]\s+)?")
_NUMBERED = re.compile(r"^\s*(\d{1,3})[.)]\s+")
_LETTERED = re.compile(r"^\s*\(?([a-zA-Z])\)\s+")

_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_TARGET = r"\((?:[^()\s]|\([^()\s]*\))*(?:\s+(?:\"[^\"]*\"|'[^']*'))?\s*\)"
_INLINE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL), " "),
    (re.compile(r"<((?:https?://|mailto:)[^<>\s]+)>"), r"\1"),
    (re.compile(r"<br\s*/?>", re.IGNORECASE), "\n\n"),
    (re.compile(r"</?[a-zA-Z][^<>]*>"), " "),
    (re.compile(r"!\[([^\[\]]*)\]" + _TARGET), r"\1"),
    (re.compile(r"(?<!!)\[([^\[\]]*)\]" + _TARGET), r"\1"),
    # A link of which a part is in another piece.
    (re.compile(r"\[(?=[^\[\]]*\Z)"), ""),
    (re.compile(r"\]\((?=\S*[/.#])[^\s()]*\)?"), " "),
    (re.compile(r"\[\^[^\]\s]*\]:?|(?<=[\w.,;:!?\])])\s?\[\d{1,3}(?:\s?[,–-]\s?\d{1,3})*\]"), " "),
    (re.compile(r"\[([^\[\]]*)\]\[[^\[\]]*\]"), r"\1"),
    # What remains of marks when multiplication is a word.
    (
        re.compile(
            r"(?<=[\w)]) \* (?=[\w(])|(?<=\d)\*(?=[\da-z(])|(?<=\b[a-zA-Z])\*(?=[a-zA-Z]\b)"
        ),
        " × ",
    ),
    (re.compile(r"\\([!-/:-@\[-`{-~])"), r"\1"),
    (re.compile(r"\*+|~~+|(?<!\w)_+|_+(?!\w)|`+"), ""),
    (re.compile(r"_+"), " "),
)
# An ellipsis at the end of a line ends the sentence too.
_TRAILING_OFF = re.compile(r"(?:…|\.{3,})\s*$")


def plain(text: str, *, starts_line: bool, say_code: Callable[[str], str]) -> str:
    """
    Args:
        starts_line: the text's first characters are the first ones of a line.
        say_code: words of an inline code.
    """
    text = html.unescape(text).replace("\r", "\n")
    lines = text.split("\n")
    text = _joined([_line(line) if at or starts_line else line for at, line in enumerate(lines)])
    text = _CODE.sub(lambda code: f" {say_code(code[2])} ", text)
    text = without_latex(text)
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return _joined(text.split("\n"))


def _line(line: str) -> str:
    """A line without the marks at its start; what they make of its end stays visible."""
    line = _QUOTE.sub("", line)
    if _RULE.match(line):
        return ""
    if heading := _HEADING.match(line):
        return f"{heading[1]}." if heading[1] and heading[1][-1] not in ".!?:" else heading[1]
    line, n_bullets = _BULLET.subn("", line)
    line, n_numbers = _NUMBERED.subn(r"\1. ", line)
    line, n_letters = _LETTERED.subn(r"\1: ", line)
    # A break before an item is never soft, though the item may begin with a small letter.
    return f"\0{line}" if n_bullets or n_numbers or n_letters else line


def _joined(lines: list[str]) -> str:
    """One line: each break that does not only wrap a sentence ends one."""
    text = ""
    ends = False  # an empty line was passed
    for line in lines:
        stripped = line.strip().lstrip("\0")
        if not stripped:
            ends = True
            continue
        soft = not ends and "\0" not in line and is_soft(text.rstrip(), "", stripped[0])
        if text and not soft:
            text = _TRAILING_OFF.sub("", text)
            closed = text.rstrip("\"'”’»)]}*_~` ")[-1:] in tuple(".!?:;,…。！？；：")
            text += " " if closed else ". "
        elif text:
            text += " "
        text += stripped
        ends = False
    return text


# Commands of LaTeX that are frequent in responses; others are left out.
_SYMBOLS = {
    "times": "×", "cdot": "×", "div": "÷", "pm": "±", "leq": "≤", "le": "≤", "geq": "≥",
    "ge": "≥", "neq": "≠", "ne": "≠", "approx": "≈", "infty": "∞", "rightarrow": "→", "to": "→",
    "implies": "⇒", "Rightarrow": "⇒", "equiv": "≡", "in": "∈", "sum": "∑", "int": "∫",
    "partial": "∂", "circ": "°", "ldots": "…", "cdots": "…", "dots": "…", "ln": "L N",
}  # fmt: skip
_WORDS = frozenset(
    listed(
        "alpha beta gamma delta epsilon zeta eta theta lambda mu nu xi pi rho sigma tau "
        "phi chi psi omega Gamma Delta Theta Lambda Pi Sigma Phi Psi Omega log sin cos "
        "tan exp max min lim"
    )
)
_GROUP = r"\{([^{}]*)\}"
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[^{}]*\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*" + _GROUP + r"\s*" + _GROUP)
_ROOT = re.compile(r"\\sqrt\s*" + _GROUP)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|mathit|boxed|operatorname)\s*" + _GROUP)
_POWER = re.compile(r"\^" + _GROUP)
_INDEX = re.compile(r"(?<=[A-Za-z0-9])_(?:" + _GROUP + r"|(?=\w))")
_COMMAND = re.compile(r"\\([A-Za-z]+)(?![A-Za-z])\s?")
_SPACE = re.compile(r"\\(?:[,;:! ]|\\)|&(?=\s*[=<>])")
_DELIMITER = re.compile(r"\\[()\[\]]|\$\$")
_DOLLARS = re.compile(r"\$(?!\d[\d,.]*\s)([^$\n]*[\\^_=][^$\n]*)\$(?!\d)")
_DEPTH = 4


def _command(found: re.Match[str]) -> str:
    name = found[1]
    if name in _SYMBOLS:
        return f" {_SYMBOLS[name]} "
    return f" {name} " if name in _WORDS else " "


def without_latex(text: str) -> str:
    """The text with symbols and words for its commands, on which maths.py goes on."""
    if "\\" not in text and "$" not in text:
        return text
    # A folder's name is no command.
    if "\\" in text and re.search(r"[A-Za-z]:\\", text):
        return text.replace("\\", " ")
    text = _ENVIRONMENT.sub(" ", text.replace("{,}", ","))
    text = _DOLLARS.sub(r" \1 ", _DELIMITER.sub(" ", text))
    for _ in range(_DEPTH):
        before = text
        text = _TEXT.sub(r" \1 ", text)
        text = _ROOT.sub(r" √ \1 ", text)
        text = _FRACTION.sub(_fraction, text)
        text = _POWER.sub(r"^\1", text)
        if text == before:
            break
    if "\\" in text:
        text = _INDEX.sub(r" \1", text)
    return _COMMAND.sub(_command, _SPACE.sub(" ", text))


def _fraction(found: re.Match[str]) -> str:
    above, below = found[1].strip(), found[2].strip()
    return f" {above}/{below} " if (above + below).isdigit() else f" {above} over {below} "
