"""Claims about who allocates the buffers of a KV pool."""

import pytest

from sglang_live.bridge.memory.kv_memory import allocated_by, create_buffers

POOL = object()


def test_sglang_allocates_unless_a_part_does():
    made: list[tuple[str, object]] = []

    def upstream(pool: object) -> None:
        made.append(("sglang", pool))

    with allocated_by(lambda _, pool: made.append(("part", pool))):
        create_buffers(upstream, POOL)
    create_buffers(upstream, POOL)
    assert made == [("part", POOL), ("sglang", POOL)]


def test_a_part_that_fails_leaves_the_next_pool_to_sglang():
    made: list[object] = []
    with pytest.raises(OSError, match="full"), allocated_by(lambda *_: made.append("part")):
        raise OSError("full")
    create_buffers(made.append, POOL)
    assert made == [POOL]
