"""Log lines as JSON objects, for `--log-format json`.

In: log records whose templates are "event name=%s other=%d". Out: one object a line, with the event
and its values as fields of their own.
"""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from sglang_live.telemetry.log_context import log_ids

_EVENT = re.compile(r"([a-z][a-z0-9_]*)(?=$|[ :])")
# A name and its placeholder, or a placeholder alone: both take one of the record's arguments.
_PLACEHOLDER = re.compile(r"(?:(?<![\w.])(\w+)=)?%(?:[-+ #0]*\d*(?:\.\d+)?)[a-zA-Z]")
_FIXED = frozenset({"time", "level", "process", "logger", "event", "message", "exception"})


class JsonFormatter(logging.Formatter):
    """process: name of the process that writes the line, such as "gateway" or "thinker/0"."""

    def __init__(self, process: str = ""):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            **log_ids(),
            **event_fields(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def event_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The event of a record and its named values; empty if its template is not of that form."""
    template = str(record.msg)
    event = _EVENT.match(template)
    if event is None or not isinstance(record.args, tuple):
        return {}
    names = [match[1] for match in _PLACEHOLDER.finditer(template.replace("%%", ""))]
    if len(names) != len(record.args) or (not names and event[0] != template):
        return {}
    values = zip(names, record.args, strict=True)
    return {"event": event[0]} | {
        name: value if isinstance(value, int | float | str | bool | None) else str(value)
        for name, value in values
        if name is not None and name not in _FIXED
    }


def text_lines(line: bytes) -> list[str]:
    """A line as lines of text: message and traceback of a JSON object, or the line itself."""
    found = _object_of(line)
    if found is None or "message" not in found:
        return line.decode(errors="replace").splitlines()
    return f"{found['message']}\n{found.get('exception', '')}".rstrip().splitlines()


def as_json_line(line: bytes, process: str) -> bytes:
    """A line that a process printed without the logger, as an object; objects stay as they are.

    Args:
        line: without its newline.
    """
    if _object_of(line) is not None:
        return line
    return json.dumps({"process": process, "message": line.decode(errors="replace")}).encode()


def _object_of(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        found: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):  # a process may print anything
        return None
    return found
