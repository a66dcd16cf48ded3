"""Ids of the session, response, turn or job that the current task works for.

In: set_log_ids() where a task starts. Out: log_ids(), which every log line of that task carries.
Tasks inherit the ids of the task that creates them.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

_NONE: Mapping[str, str] = MappingProxyType({})
_ids: ContextVar[Mapping[str, str]] = ContextVar("log_ids", default=_NONE)


def set_log_ids(**ids: str) -> None:
    """Add ids to the log lines of the current task until it ends."""
    _ids.set(MappingProxyType({**_ids.get(), **ids}))


def log_ids() -> Mapping[str, str]:
    """The ids of the current task, by name."""
    return _ids.get()
