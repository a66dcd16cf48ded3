"""Who allocates the K and V buffers of SGLang's pools: SGLang, or a part of the scheduler.

In: pools of plain attention, as they are made. Owner: the part, in its making_pools().
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Called with SGLang's own function and the pool, whose k_buffer and v_buffer it sets.
Allocate = Callable[[Callable[[Any], None], Any], None]


def by_sglang(upstream: Callable[[Any], None], pool: Any) -> None:
    upstream(pool)


_allocate: Allocate = by_sglang


@contextmanager
def allocated_by(allocate: Allocate) -> Iterator[None]:
    """A pool that is made within it has its buffers from this function."""
    global _allocate
    before, _allocate = _allocate, allocate
    try:
        yield
    finally:
        _allocate = before


def create_buffers(upstream: Callable[[Any], None], pool: Any) -> None:
    """Around MHATokenToKVPool._create_buffers_normal."""
    _allocate(upstream, pool)
