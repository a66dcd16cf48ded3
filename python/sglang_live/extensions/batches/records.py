"""What is stored of files, batches and lines, and its form in OpenAI's API."""

import re
import time
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

VALIDATING, FAILED, IN_PROGRESS, FINALIZING = "validating", "failed", "in_progress", "finalizing"
COMPLETED, EXPIRED, CANCELLING, CANCELLED = "completed", "expired", "cancelling", "cancelled"
ENDED = (FAILED, COMPLETED, EXPIRED, CANCELLED)
# Statuses whose beginning a batch object names, as `completed_at`.
_DATED = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files
# Prefixes of ids. A list is read page by page after an id, which need not exist any more: the order
# is in the id.
FILE, BATCH = "file-", "batch_"
# Milliseconds since 1970, then random digits; OpenAI's ids are at most 32 characters.
_TIME_DIGITS, _RANDOM_DIGITS = 11, 15
_ID = re.compile(rf"(?:{FILE}|{BATCH})[0-9a-f]{{{_TIME_DIGITS + _RANDOM_DIGITS}}}")


class OrderedIds:
    """Each id is greater than those before it. Owner: one OrderedIds per process."""

    def __init__(self) -> None:
        self._latest_ms = 0

    def new(self, prefix: str) -> str:
        self._latest_ms = max(self._latest_ms + 1, time.time_ns() // 1_000_000)
        return f"{prefix}{self._latest_ms:0{_TIME_DIGITS}x}{token_hex(8)[:_RANDOM_DIGITS]}"


def is_id(text: str, prefix: str) -> bool:
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Tokens:
    """n_cached: those of the input whose KV was there."""

    n_in: int = 0
    n_cached: int = 0
    n_out: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(
            self.n_in + other.n_in, self.n_cached + other.n_cached, self.n_out + other.n_out
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self.n_in,
            "input_tokens_details": {"cached_tokens": self.n_cached},
            "output_tokens": self.n_out,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.n_in + self.n_out,
        }


NO_TOKENS = Tokens()


def tokens_of(body: Any) -> Tokens:
    """Of a response: chats and completions count prompt_tokens, others input_tokens."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return NO_TOKENS
    details = usage.get("prompt_tokens_details")
    n_cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    n_in = usage.get("prompt_tokens", usage.get("input_tokens"))
    n_out = usage.get("completion_tokens", usage.get("output_tokens"))
    return Tokens(n_in or 0, n_cached or 0, n_out or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """owner: see Database.owner_of. name: as the client calls it. expires_s: None: never."""

    id: str
    owner: str
    purpose: str
    name: str
    n_bytes: int
    created_s: int
    expires_s: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.n_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why an input file is refused. n_line: from 1; None: the fault is of the whole file."""

    code: str
    message: str
    n_line: int | None = None
    param: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "line": self.n_line,
            "message": self.message,
            "param": self.param,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """
    expires_s: end of the completion window.
    moments: Unix time at which it got each of its statuses.
    faults: of the input file, in the form of the API.
    n_lines: of the input file, n_completed and n_failed of them have a result.
    output_file, error_file: ids that the files of results have or will have.
    output_bytes, error_bytes: size of those files; what lies beyond it was never committed.
    results_kept_s: lifetime of those files.
    input_tokens, cached_tokens, output_tokens: of all results so far.
    """

    id: str
    owner: str
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    status: str = VALIDATING
    created_s: int
    expires_s: int
    results_kept_s: int
    metadata: dict[str, str] | None = None
    moments: dict[str, int] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    n_lines: int = 0
    n_completed: int = 0
    n_failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.input_tokens, self.cached_tokens, self.output_tokens)

    @property
    def n_left(self) -> int:
        return self.n_lines - self.n_completed - self.n_failed

    def to_json(self, model: str, paused: str | None) -> dict[str, Any]:
        """paused: reason why no line of a batch in progress starts; None: there is none."""
        has_files = self.status in ENDED
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": model,
            "errors": {"object": "list", "data": self.faults} if self.faults else None,
            "input_file_id": self.input_file,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file if has_files and self.output_bytes else None,
            "error_file_id": self.error_file if has_files and self.error_bytes else None,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{name}_at": self.moments.get(name) for name in _DATED},
            "request_counts": {
                "total": self.n_lines,
                "completed": self.n_completed,
                "failed": self.n_failed,
            },
            "metadata": self.metadata,
            "usage": self.tokens.to_json(),
            "paused": paused if self.status == IN_PROGRESS else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of an input file.

    n: from 1. at: position in the file, and n_bytes its length there.
    attempts: how often a server has begun it, this time included.
    """

    n: int
    custom_id: str
    at: int
    n_bytes: int
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a line. text: its line in the file of results, with the line's end."""

    n: int
    succeeded: bool
    text: bytes
    tokens: Tokens = NO_TOKENS
