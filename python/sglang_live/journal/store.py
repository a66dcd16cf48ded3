"""Where the journal keeps sessions: by id, each with its owner's epoch and its sealed records.

A session belongs to the gateway that has written its highest epoch. Only that one writes, until
another takes the session with the next epoch, which both kinds of store do in one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from sglang_live.errors import LiveError


class StoreError(LiveError):
    """The store cannot be reached."""

    code = "journal_unavailable"
    http_status = 503


class Outcome(Enum):
    """Of a write. TAKEN: another epoch has the session. GONE: it has expired, or was deleted."""

    WRITTEN = "written"
    TAKEN = "taken"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Write:
    """
    records: by name; None: deleted.
    token: digest of the one that resumes the session; "": as before.
    is_first: the session is begun.
    """

    session_id: str
    epoch: int
    records: Mapping[str, bytes | None] = field(default_factory=dict)
    token: str = ""
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """token: "": it was used."""

    session_id: str
    epoch: int
    token: str
    records: Mapping[str, bytes]


class Store(Protocol):
    """All methods raise StoreError."""

    async def open(self) -> None:
        """Once, before all else."""

    async def write(self, writes: Sequence[Write], keep_s: float) -> list[Outcome]:
        """Each as a whole or not at all. keep_s: until the session expires, unless written to."""
        ...

    async def read(self, session_id: str) -> Kept | None: ...

    async def take(self, session_id: str, epoch: int, token: str) -> bool:
        """Begin the next epoch with the token, which is used then. Returns False if the session
        is in another epoch by now, or has another token."""
        ...

    async def delete(self, session_id: str, epoch: int) -> None:
        """Without effect if the session is in another epoch."""

    async def close(self) -> None: ...
