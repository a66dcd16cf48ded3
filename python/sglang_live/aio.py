"""Asynchronous tasks: vital ones, ones in the background, timers, results that wait with helper
tasks, merged sources, channels."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.clock import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")

# EX_SOFTWARE of sysexits.h.
EXIT_BROKEN = 70

# Items that a merged source may be ahead of the consumer.
_AHEAD = 2
# From the failure of a lasting task to its next try.
RETRY_S = 1.0
# From a cancellation that a task may have swallowed to the next one.
_AGAIN_S = 0.1


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


class FailedTasks:
    """Counts tasks of this process that ended with an error which no one waits for, by name."""

    def __init__(self) -> None:
        self.n_by_name: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        counter = CounterMetricFamily(
            "sglang_live_failed_tasks", "Background tasks that failed.", labels=["task"]
        )
        for name, n in self.n_by_name.items():
            counter.add_metric([name], n)
        yield counter


failed_tasks = FailedTasks()


def background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that no one waits for: its error is logged and counted.

    name: of its kind.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_note_failure)
    return task


def _note_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        failed_tasks.n_by_name[task.get_name()] += 1
        log.error("task_failed name=%r", task.get_name(), exc_info=error)


async def lasting(work: Callable[[], Coroutine[Any, Any, None]], name: str, clock: Clock) -> None:
    """Run work without end: after an error, which is logged and counted, it begins anew."""
    while True:
        with suppress(Exception):
            await background(work(), name)
        await clock.sleep(RETRY_S)


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it has ended: before Python 3.12 asyncio.wait_for, which a library may
    use, can swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_S)


class Timer:
    """Calls back once, after a delay. name: of its task, if the call fails."""

    def __init__(self, clock: Clock, on_end: Callable[[], None], name: str):
        self._clock = clock
        self._on_end = on_end
        self._name = name
        self._task: asyncio.Task[None] | None = None

    @property
    def armed(self) -> bool:
        return self._task is not None

    def arm(self, delay_s: float) -> None:
        """Call on_end after delay_s, unless disarmed or armed again."""
        self.disarm()
        self._task = background(self._wait(delay_s), self._name)

    def disarm(self) -> None:
        if self._task:
            self._task.cancel()
            self._task = None

    async def _wait(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self._task = None  # on_end may arm or disarm and must not cancel its own task
        self._on_end()


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
        # Also of one that has failed beside a helper, whose error is raised: it is retrieved.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def close_all(*closes: Callable[[], object]) -> None:
    """Call all in this order, and wait for those that are asynchronous, whatever the ones before
    raise. The last error is raised at the end, with those before it as its context."""
    if closes:
        close, *others = closes
        try:
            if isinstance(closing := close(), Awaitable):
                await closing
        finally:
            await close_all(*others)


class CancelledSourceError(RuntimeError):
    """A source ended by a cancellation that was not its consumer's."""


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


class Channel(Generic[T]):
    """Items on their way from producers to one consumer, which iterates over them.

    Args:
        size: items that were not taken; `put` waits for the consumer when there are as many.
    """

    def __init__(self, size: int) -> None:
        self._items: asyncio.Queue[T | _End] = asyncio.Queue()  # the semaphore bounds it
        self._room = asyncio.Semaphore(size)
        self._is_closed = False

    async def put(self, item: T) -> None:
        await self._room.acquire()
        if self._is_closed:
            self._room.release()  # for the next producer that waits
        else:
            self._items.put_nowait(item)

    def end(self, error: Exception | None = None) -> None:
        """End the iteration behind all items that were put; with the error, if there is one."""
        self._items.put_nowait(_End(error))

    def close(self) -> None:
        """The consumer has gone: later items are dropped, and no producer waits."""
        self._is_closed = True
        self._room.release()

    def __aiter__(self) -> "Channel[T]":
        return self

    async def __anext__(self) -> T:
        item = await self._items.get()
        if not isinstance(item, _End):
            self._room.release()
            return item
        if item.error is not None:
            raise item.error
        raise StopAsyncIteration


Source = AsyncGenerator[T, None] | Coroutine[Any, Any, None]


async def merge(*sources: Source[T], ahead: int = _AHEAD) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they come, until all sources have ended.

    A coroutine is a source without items. The first error of a source is raised here;
    CancelledSourceError where it is a cancellation. When the iterator closes, every source is
    closed.

    Args:
        ahead: items that were not yielded; with as many, the sources wait.
    """
    channel: Channel[T] = Channel(ahead)
    n_running = len(sources)

    async def pump(source: Source[T]) -> None:
        nonlocal n_running
        try:
            if isinstance(source, Coroutine):
                await source
            else:
                async with aclosing(source):
                    async for item in source:
                        await channel.put(item)
        except asyncio.CancelledError:
            channel.end(CancelledSourceError("a source was cancelled"))
            raise
        except Exception as error:
            channel.end(error)
        n_running -= 1
        if not n_running:
            channel.end()

    if not sources:
        return
    pumps = [asyncio.create_task(pump(source)) for source in sources]
    try:
        async for item in channel:
            yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for source in sources:
            if isinstance(source, Coroutine):
                source.close()  # of a pump that never ran
