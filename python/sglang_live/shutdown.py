"""Signals of the server process: they interrupt the start, then drain and stop the server.

In: SIGINT, SIGTERM, SIGHUP. Out: Drain and uvicorn's flags.
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from sglang_live.errors import LiveError
from sglang_live.gateway.draining import Drain

log = logging.getLogger("sglang_live")

# Time for clients to answer close frames.
_CLOSING_S = 2.0


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers of its own.

    uvicorn closes its port at the first signal, and raises the signal again when it has stopped.
    """

    draining: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def start_or_interrupt(start: Coroutine[Any, Any, None]) -> None:
    """Start all stages. SIGINT and SIGTERM interrupt this slow part of the start.

    Raises:
        LiveError: a signal came, or a stage did not start.
    """
    loop, starting = asyncio.get_running_loop(), asyncio.ensure_future(start)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, starting.cancel)
    try:
        await starting
    except asyncio.CancelledError:
        raise LiveError("interrupted while starting") from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def stop_on_signals(server: Server, drain: Drain, drain_s: float) -> None:
    """The first signal drains the server, the second ends it at once."""
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if drain.began.is_set():
            log.warning("stopping_at_once signal=%s", signal.Signals(number).name)
            drain.over.set()
            server.should_exit = server.force_exit = True
            return
        log.warning("draining signal=%s limit_s=%g", signal.Signals(number).name, drain_s)
        drain.began.set()
        server.draining = loop.create_task(_drain(server, drain, drain_s), name="drain")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)


async def _drain(server: Server, drain: Drain, drain_s: float) -> None:
    try:
        async with asyncio.timeout(drain_s):
            await drain.until_quiet()
    except TimeoutError:
        log.warning("drain_timed_out limit_s=%g", drain_s)
    drain.over.set()
    try:
        async with asyncio.timeout(_CLOSING_S):
            await drain.until_quiet()
    except TimeoutError:
        pass  # uvicorn closes the remaining connections
    server.should_exit = True
