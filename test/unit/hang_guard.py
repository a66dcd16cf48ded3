"""An end for a test that hangs, also within an event loop."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ended_after(seconds: float, name: str) -> Iterator[None]:
    """End the function or coroutine of this name after `seconds`, and so on for its tear-down.

    An exception alone is lost in an event loop: uvloop logs what a signal's handler raises while
    it waits, a task of the tested part may catch it, and a timer that it interrupts never wakes
    who waits for it. So the task is cancelled as well; if it has ended, all others are.
    """

    def end(*_) -> None:
        message = f"{name} took longer than {seconds:g} s"
        with contextlib.suppress(RuntimeError):  # no loop runs
            tasks = asyncio.all_tasks(asyncio.get_running_loop())
            own = {task for task in tasks if task.get_coro().__name__ == name}
            for task in own or tasks:
                task.cancel(message)
        raise TimeoutError(message)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
