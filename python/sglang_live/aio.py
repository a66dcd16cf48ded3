"""Asynchronous tasks: vital ones, results that wait with helper tasks, merged sources."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

# EX_SOFTWARE of sysexits.h.
EXIT_BROKEN = 70

_END = object()


def vital(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task without which the process is useless: if it ends by itself, the process exits.

    A stage that runs without it would keep its clients waiting; one that exits is started anew.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_exit_unless_cancelled)
    return task


def _exit_unless_cancelled(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical("task_ended name=%r", task.get_name(), exc_info=task.exception())
        logging.shutdown()
        os._exit(EXIT_BROKEN)


async def result_with(main: Coroutine[Any, Any, T], *helpers: asyncio.Task[Any]) -> T:
    """Wait for the result of `main`. An error of a helper cancels `main` and is raised instead.

    Helpers may end before `main`, and continue after it.
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


async def merge(*sources: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they come, until all sources have ended.

    The first error of a source is raised here. When the iterator closes, every source is closed.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def pump(source: AsyncGenerator[T, None]) -> None:
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
