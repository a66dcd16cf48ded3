"""The simulated event loop: order, time, and what it refuses."""

import asyncio
import socket

import pytest

from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.loop import SimulatedLoop


def complete(loop: SimulatedLoop, work):
    """The result of a coroutine that ends while there is something left to happen."""
    task = loop.create_task(work)
    loop.run()
    assert task.done(), "it waits for what will never happen"
    return task.result()


@pytest.fixture
def loop() -> SimulatedLoop:
    return SimulatedLoop(Events())


def test_time_jumps_to_the_next_timer_and_is_exact(loop):
    async def wait() -> float:
        await asyncio.sleep(0.1)
        await loop.events.sleep(3600.0)
        return loop.time()

    assert complete(loop, wait()) == 0.1 + 3600.0


def test_what_is_due_at_one_moment_happens_in_the_order_in_which_it_was_set(loop):
    seen: list[str] = []

    async def note(name: str) -> None:
        await asyncio.sleep(1.0)
        seen.append(name)

    async def all_of_them() -> None:
        loop.events.at(1.0, lambda: seen.append("event"))
        tasks = [asyncio.create_task(note(str(n))) for n in range(5)]
        loop.call_at(1.0, seen.append, "timer")
        await asyncio.gather(*tasks)

    complete(loop, all_of_them())
    assert seen == ["event", "timer", "0", "1", "2", "3", "4"]


def test_a_cancelled_timer_moves_no_time(loop):
    async def in_time() -> float:
        async with asyncio.timeout(30.0):
            await asyncio.sleep(1.0)
        return loop.time()

    assert complete(loop, in_time()) == 1.0
    loop.run()
    assert loop.time() == 1.0


def test_a_timeout_ends_a_wait_at_its_time(loop):
    async def late() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return loop.time()

    assert complete(loop, late()) == 2.5


def test_a_wait_without_end_outlasts_the_run_until_that_is_ended(loop):
    task = loop.create_task(asyncio.Event().wait())
    loop.run()
    assert not task.done()
    loop.end()
    assert task.cancelled()


def test_a_run_ends_at_its_limit_and_goes_on_from_there(loop):
    seen: list[float] = []

    async def tick() -> None:
        for _ in range(4):
            await asyncio.sleep(1.0)
            seen.append(loop.time())

    task = loop.create_task(tick())
    loop.run(until_s=2.5)
    assert seen == [1.0, 2.0]
    loop.run()
    assert seen == [1.0, 2.0, 3.0, 4.0] and task.done()


def test_an_abandoned_generator_is_closed(loop):
    closed: list[bool] = []

    async def numbers():
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(1.0)
            closed.append(True)

    async def take_one() -> None:
        async for _ in numbers():
            return

    complete(loop, take_one())
    assert closed == [True]


def test_an_error_that_no_one_waits_for_is_kept(loop):
    async def fail() -> None:
        raise ValueError("of a task")

    loop.create_task(fail())
    loop.run()
    assert [repr(error) for error in loop.errors] == ["ValueError('of a task')"]


def test_the_error_of_an_event_ends_the_run(loop):
    loop.events.at(1.0, lambda: {}["missing"])
    with pytest.raises(KeyError):
        loop.run()


def test_work_of_threads_is_done_at_once(loop):
    async def compute() -> tuple[int, float]:
        return await asyncio.to_thread(lambda: 6 * 7), loop.time()

    assert complete(loop, compute()) == (42, 0.0)


def test_sockets_are_refused(loop):
    async def connect() -> None:
        with socket.socket() as own:
            await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", 9))

    with pytest.raises(NotImplementedError):
        complete(loop, connect())
