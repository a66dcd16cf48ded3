"""Tasks that others rely on, and waiting for one while others work beside it."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

from sglang_live.stages.endings import EXIT_BROKEN

log = logging.getLogger(__name__)

T = TypeVar("T")


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


async def result_beside(main: Coroutine[Any, Any, T], *helpers: asyncio.Task) -> T:
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
