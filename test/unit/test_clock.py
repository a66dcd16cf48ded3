"""Time that a test moves by hand."""

import asyncio

import pytest

from sglang_live.clock import MonotonicClock, SimClock


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_sleepers_wake_when_their_time_comes_in_order():
    clock, woken = SimClock(start_s=10.0), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (3, 1, 2)]
    await settled()
    clock.advance(0.5)
    await settled()
    assert woken == []
    clock.advance(1.5)
    await settled()
    assert woken == [1, 2]
    clock.advance(100)
    await asyncio.gather(*tasks)
    assert (woken, clock.now_s()) == ([1, 2, 3], 112.0)


async def test_a_sleeper_that_was_cancelled_does_not_disturb_the_others():
    clock = SimClock()
    gone, waiting = (asyncio.create_task(clock.sleep(1)) for _ in range(2))
    await settled()
    gone.cancel()
    await settled()
    clock.advance(1)
    await waiting


@pytest.mark.parametrize("clock", [SimClock(), MonotonicClock()], ids=["simulated", "real"])
@pytest.mark.parametrize("seconds", [0, -1.0])
async def test_no_time_is_no_wait(clock, seconds):
    before_s = clock.now_s()
    await clock.sleep(seconds)
    assert clock.now_s() - before_s < 1
