"""One line per log record: text of clients and models cannot write lines of its own into a log.

In: log records of this process and its libraries. Out: the same with control characters escaped.
"""

import logging
import unicodedata
from multiprocessing import parent_process
from typing import Any

from sglang_live.telemetry.expected_lines import forgo_expected_lines
from sglang_live.telemetry.log_context import log_ids
from sglang_live.telemetry.log_json import JsonFormatter

# Unicode categories: control characters, line and paragraph separators, format characters such as
# those that change the direction of writing, halves of surrogate pairs. A tab is kept.
_CATEGORIES = ("Cc", "Zl", "Zp", "Cf", "Cs")


class _Escapes(dict[int, str | int]):
    """Table for str.translate, filled on demand."""

    def __missing__(self, code: int) -> str | int:
        character = chr(code)
        is_control = character != "\t" and unicodedata.category(character) in _CATEGORIES
        escaped = character.encode("unicode_escape").decode() if is_control else code
        if len(self) < 4096:
            self[code] = escaped
        return escaped


_escapes = _Escapes()


def one_line(text: str) -> str:
    """Returns the text with control characters in Python's notation: `\\n`, `\\x1b`, `\\u2028`."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_escapes)


class LineRecord(logging.LogRecord):
    """A record whose message is one line."""

    def getMessage(self) -> str:
        return one_line(super().getMessage())


class LineFormatter(logging.Formatter):
    """Appends the ids of the current task to a line that does not have them.

    Lines of a traceback begin with a bar, because an exception's text may have lines of its own.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = (f"{name}={value}" for name, value in log_ids().items())
        return " ".join(
            [super().formatMessage(record), *(i for i in ids if i not in record.message)]
        )

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  | {one_line(line)}" for line in lines)


def formatter(process: str, as_json: bool) -> logging.Formatter:
    """Of the lines of a process and of those that it spawns.

    Args:
        process: a name such as "thinker/0". Empty: the server.
    """
    if process and parent_process() is not None:
        process = f"{process} engine"
    if as_json:
        return JsonFormatter(process or "gateway")
    name = f"{process} " if process else ""
    return LineFormatter(f"%(asctime)s {name}%(levelname)s %(name)s: %(message)s")


def log_in_lines(process: str | None = None, *, as_json: bool = False) -> None:
    """One line per record, for all loggers of this process and its libraries.

    Args:
        process: set up the root logger on stderr, see formatter. None: it is set up elsewhere.
        as_json: JSON objects instead of text.
    """
    logging.setLogRecordFactory(LineRecord)
    forgo_expected_lines()
    if process is None:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(process, as_json))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(as_json)


def logs_json() -> bool:
    """Whether this process writes JSON objects: so that one that it starts does, too."""
    return any(isinstance(one.formatter, JsonFormatter) for one in logging.getLogger().handlers)


def engine_logging(process: str, as_json: bool) -> dict[str, Any]:
    """Settings for logging.config.dictConfig, which SGLang applies in an engine's processes.

    Libraries write warnings, this package everything.
    """
    line = {"()": f"{__name__}.formatter", "process": process, "as_json": as_json}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {"sglang_live": {"level": "INFO"}},
    }
