"""Waiting for one task while others work beside it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
