"""An event loop on the simulation's clock: asyncio code runs as part of a simulated run.

Callbacks of one moment run in the order in which they were set; then time jumps to the next event
or timer. There are neither threads nor sockets, so that a seed determines a run. A library such as
async-solipsism rounds times to microseconds, which moves device bookings, and has a queue of its
own beside that of the events.
"""

import asyncio
import contextvars
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from sglang_live.extensions.planner.simulation.events import Events

T = TypeVar("T")
Act = Callable[..., Any]
Context = contextvars.Context | None


class Call(asyncio.TimerHandle):
    """A callback that is due. Called when its time has come."""

    __slots__ = ("_what",)

    def __init__(self, when_s: float, callback: Act, args: tuple[Any, ...], context: Context):
        # Not asyncio's initialiser, which copies and formats more than is read here.
        self._when = when_s
        self._what: tuple[Act, tuple[Any, ...]] | None = callback, args
        self._context = context or contextvars.copy_context()

    def cancel(self) -> None:
        self._what = None

    def cancelled(self) -> bool:
        return self._what is None

    def when(self) -> float:
        return self._when

    def __call__(self) -> None:
        if self._what is not None:
            callback, args = self._what
            self._context.run(callback, *args)

    def __repr__(self) -> str:
        return f"<Call {self._what}>"


class SimulatedLoop(asyncio.AbstractEventLoop):
    """
    Attributes:
        events: the clock, and what else happens in the run.
        errors: of tasks and callbacks that no one waited for.
    """

    def __init__(self, events: Events) -> None:
        self.events = events
        self.errors: list[BaseException | str] = []
        self._ready: deque[Call] = deque()

    # --- running ---

    def run(self, until_s: float = float("inf")) -> None:
        """Run until nothing is left to happen, or the next event is later than until_s.

        Raises whatever a callback or an event raises.
        """
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        try:
            while True:
                while self._ready:
                    self._ready.popleft()()
                if not self.events.step(until_s):
                    return
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*before)

    def end(self) -> None:
        """End all tasks, of a run that is not to go on."""
        self.events = Events()  # what was to happen, does not
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run()

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.create_task(generator.aclose())

    # --- what asyncio asks of a loop ---

    def time(self) -> float:
        return self.events.now_s()

    def call_soon(self, callback: Act, *args: Any, context: Context = None) -> Call:  # type: ignore[override]
        call = Call(0.0, callback, args, context)
        self._ready.append(call)
        return call

    def call_later(self, delay: float, callback: Act, *args: Any, context: Context = None) -> Call:  # type: ignore[override]
        return self.call_at(self.events.now_s() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Act, *args: Any, context: Context = None) -> Call:  # type: ignore[override]
        call = Call(when, callback, args, context)
        self.events.at(when, call)
        return call

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context = None
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """At once: work of other threads takes no simulated time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or context["message"])

    def get_debug(self) -> bool:
        return False
