"""Several asynchronous sources as one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

_END = object()


async def merge(*sources: AsyncIterator[T]) -> AsyncIterator[T]:
    """Items of all sources as they come, until all have ended.

    The first error of a source is raised here. On leaving, early or not, every source is closed.
    """
    queue: asyncio.Queue = asyncio.Queue()

    async def pump(source: AsyncIterator[T]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    queue.put_nowait(item)
            queue.put_nowait(_END)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is _END:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
