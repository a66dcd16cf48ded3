"""Text of a piece of markdown: marks, tags and targets of links are removed.

In: a piece of a response, whose marks need not be complete. Out: plain text on one line, in which
line breaks have become ends of sentences. Pure.
"""

import html
import re
from collections.abc import Callable

from sglang_live.speakable.ends import is_soft
from sglang_live.speakable.latex import without_latex

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
