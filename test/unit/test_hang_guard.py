"""A test that hangs fails, whatever it waits in."""

import asyncio
import time

import pytest
import uvloop

from test.unit.hang_guard import ended_after

SOON_S = 0.05
ENDED = (TimeoutError, asyncio.CancelledError)


async def waits_for_a_loop_that_is_idle() -> None:
    await asyncio.Event().wait()


async def waits_by_timers() -> None:
    while True:
        await asyncio.sleep(0.001)


async def waits_beside_a_task_that_catches_everything() -> None:
    async def catches() -> None:
        while True:
            try:
                await asyncio.sleep(0)
            except Exception:
                continue

    other = asyncio.create_task(catches())
    try:
        await asyncio.Event().wait()
    finally:
        other.cancel()


async def blocks_the_loop() -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    "hangs",
    [
        waits_for_a_loop_that_is_idle,
        waits_by_timers,
        waits_beside_a_task_that_catches_everything,
        blocks_the_loop,
    ],
)
def test_a_coroutine_that_hangs_is_ended(hangs):
    name = hangs.__name__
    with (
        pytest.raises(ENDED, match=f"{name} took longer"),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ended_after(SOON_S, name),
    ):
        runner.run(hangs())


def test_a_tear_down_that_hangs_is_ended_too():
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ended_after(10 * SOON_S, "test"),
    ):
        for hangs in (waits_by_timers, waits_for_a_loop_that_is_idle):
            with pytest.raises(ENDED, match="test took longer"):
                runner.run(hangs())


def test_a_function_that_hangs_is_ended():
    with pytest.raises(TimeoutError, match="sleep took longer"), ended_after(SOON_S, "sleep"):
        time.sleep(60)
