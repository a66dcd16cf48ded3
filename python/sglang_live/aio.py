"""Asynchronous tasks: ones that the process depends on, results beside helpers, merged sources."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

# EX_SOFTWARE of sysexits.h.
EXIT_BROKEN = 70

_END = object()


def vital(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task without which the process is of no use: if it ends by itself, so does the process.

    A stage that only looks alive would keep its callers waiting; one that is gone is started anew.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_leave_unless_cancelled)
    return task


def _leave_unless_cancelled(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical("task_ended name=%r", task.get_name(), exc_info=task.exception())
        logging.shutdown()
        os._exit(EXIT_BROKEN)


async def result_with(main: Coroutine[Any, Any, T], *helpers: asyncio.Task) -> T:
    """The result of `main`; an error of any helper ends it and is raised instead.

    Helpers may end before `main`, and go on after it.
    """
    task = asyncio.ensure_future(main)
    try:
        while not task.done():
            running = {helper for helper in helpers if not helper.done()}
            await asyncio.wait({task, *running}, return_when=asyncio.FIRST_COMPLETED)
            for helper in helpers:
                if helper.done() and not helper.cancelled():
                    helper.result()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


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
