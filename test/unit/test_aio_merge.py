"""Several asynchronous sources as one."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.aio import merge


class Source:
    """Yields what is put into it; None ends it, an exception is raised."""

    def __init__(self, *items):
        self.queue: asyncio.Queue = asyncio.Queue()
        self.is_closed = False
        for item in items:
            self.queue.put_nowait(item)

    async def __call__(self):
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


@given(st.lists(st.lists(st.integers(), max_size=6), max_size=4))
def test_all_items_come_and_those_of_one_source_in_its_order(contents):
    async def scenario() -> list:
        sources = [Source(*[(n, item) for item in items], None) for n, items in enumerate(contents)]
        merged = [item async for item in merge(*(source() for source in sources))]
        assert all(source.is_closed for source in sources)
        return merged

    merged = asyncio.run(scenario())
    for n, items in enumerate(contents):
        assert [item for owner, item in merged if owner == n] == items
    assert len(merged) == sum(len(items) for items in contents)


async def test_an_item_does_not_wait_for_slower_sources():
    slow, fast = Source(), Source("quick")
    merged = merge(slow(), fast())
    assert await anext(merged) == "quick"
    slow.queue.put_nowait("late")
    assert await anext(merged) == "late"
    await merged.aclose()


async def test_the_first_error_ends_all_after_the_items_before_it():
    failing, waiting = Source("one", "two", KeyError("first")), Source()
    items = []
    with pytest.raises(KeyError, match="first"):
        async for item in merge(failing(), waiting()):
            items.append(item)
            waiting.queue.put_nowait(ValueError("second"))
    assert items == ["one", "two"]
    assert failing.is_closed and waiting.is_closed


async def test_closing_early_closes_every_source():
    sources = [Source("item"), Source(), Source()]
    merged = merge(*(source() for source in sources))
    await anext(merged)
    assert not any(source.is_closed for source in sources)
    await merged.aclose()
    assert all(source.is_closed for source in sources)


async def test_cancelling_the_consumer_closes_every_source():
    sources = [Source(), Source()]

    async def consume() -> None:
        async for _ in merge(*(source() for source in sources)):
            pass

    consuming = asyncio.create_task(consume())
    for _ in range(3):
        await asyncio.sleep(0)
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming
    assert all(source.is_closed for source in sources)


async def test_nothing_to_merge_is_an_empty_stream():
    assert [item async for item in merge()] == []
