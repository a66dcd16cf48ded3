"""One record, one line: what clients and models say cannot write lines of its own into a log.

In: log records of this process, whoever makes them. Out: the same with control characters escaped.
"""

import logging
import unicodedata

# Of Unicode: control, line and paragraph separators, what turns the direction of writing, halves of
# surrogate pairs. A tab stays.
_CATEGORIES = ("Cc", "Zl", "Zp", "Cf", "Cs")


class _Escapes(dict):
    """For str.translate; fills itself."""

    def __missing__(self, code: int) -> str | int:
        character = chr(code)
        is_control = character != "\t" and unicodedata.category(character) in _CATEGORIES
        escaped = character.encode("unicode_escape").decode() if is_control else code
        if len(self) < 4096:
            self[code] = escaped
        return escaped


_escapes = _Escapes()


def one_line(text: str) -> str:
    """The text with control characters as Python writes them: `\\n`, `\\x1b`, `\\u2028`."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_escapes)


class LineRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return one_line(super().getMessage())


class LineFormatter(logging.Formatter):
    """Lines of a traceback begin with a bar, for an exception's text may have some of its own."""

    def formatException(self, ei) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  | {one_line(line)}" for line in lines)


def log_in_lines(format_: str | None = None) -> None:
    """For all loggers of this process, those of libraries among them.

    Args:
        format_: of the root logger's lines, on stderr; None: somebody else sets that up.
    """
    logging.setLogRecordFactory(LineRecord)
    if format_ is not None:
        handler = logging.StreamHandler()
        handler.setFormatter(LineFormatter(format_))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
