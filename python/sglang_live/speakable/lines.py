"""Which lines of a growing markdown text are not spoken: fenced code and rows of tables.

In: one character after the other. Out: the moment at which a skipped block begins or ends.
"""

import re
from enum import Enum

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
