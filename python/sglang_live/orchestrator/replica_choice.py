"""Which replica of a stage a session gets. Pure; a session stays with it until it is down."""

from collections.abc import Callable, Iterable, Sized
from typing import Protocol, TypeVar

from sglang_live.errors import StageUnavailableError


class Choosable(Protocol):
    @property
    def is_up(self) -> bool: ...

    @property
    def sessions(self) -> Sized:
        """Those that stay with it."""
        ...


_Replica = TypeVar("_Replica", bound=Choosable)


def least_loaded(
    stage: str,
    replicas: Iterable[_Replica],
    has_room: Callable[[_Replica], bool] = lambda replica: True,
) -> _Replica:
    """The replica with the fewest sessions of those that are up; the first of equal ones.

    Args:
        has_room: whether it has room for one more. One that has none is returned only if all are
            so.
    Raises:
        StageUnavailableError: none is up.
    """
    up = [replica for replica in replicas if replica.is_up]
    if not up:
        raise StageUnavailableError(f"no {stage} is up", retry_after_s=10)
    return min(up, key=lambda replica: (not has_room(replica), len(replica.sessions)))
