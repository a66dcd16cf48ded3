"""The KV pool of one engine, in tokens."""

from collections.abc import Callable
from dataclasses import dataclass


class PoolFullError(RuntimeError):
    """The load needs more KV than the pool has, and nothing can be evicted for it."""


def _nothing() -> int:
    return 0


def _wants_nothing() -> bool:
    return False


def _evict_nothing(n_tokens: int) -> None:
    """Without a tier no KV is evicted."""


@dataclass(slots=True, kw_only=True)
class KvPool:
    """
    total, used: tokens. What the radix tree could evict counts as free.
    rows, rows_used: request rows.
    evictable, evict: tokens of idle sessions, and what evicts some of them; see tiers.py.
    wanted: whether KV of a user who speaks waits for room.
    """

    name: str
    total: int
    rows: int
    used: int = 0
    rows_used: int = 0
    most_used: int = 0
    evictable: Callable[[], int] = _nothing
    evict: Callable[[int], None] = _evict_nothing
    wanted: Callable[[], bool] = _wants_nothing

    @property
    def free(self) -> int:
        return self.total - self.used + self.evictable()

    @property
    def free_rows(self) -> int:
        return self.rows - self.rows_used

    def take(self, n_tokens: int) -> None:
        """Raises PoolFullError if fewer are free."""
        self.used += n_tokens
        if self.used > self.total:
            self.evict(self.used - self.total)
        if self.used > self.total:
            raise PoolFullError(
                f"the {self.name}'s pool of {self.total} tokens is full: simulate a larger one"
            )
        self.most_used = max(self.most_used, self.used)

    def release(self, n_tokens: int) -> None:
        self.used -= n_tokens
        assert self.used >= 0, (self.name, n_tokens)
