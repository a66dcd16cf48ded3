"""SimClock: time that a test advances."""

import asyncio

import pytest

from sglang_live.clock import MonotonicClock, SimClock


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_sleepers_wake_in_the_order_of_their_times():
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


async def test_a_cancelled_sleeper_does_not_affect_the_others():
    clock = SimClock()
    gone, waiting = (asyncio.create_task(clock.sleep(1)) for _ in range(2))
    await settled()
    gone.cancel()
    await settled()
    clock.advance(1)
    await waiting


@pytest.mark.parametrize("clock", [SimClock(), MonotonicClock()], ids=["simulated", "real"])
@pytest.mark.parametrize("seconds", [0, -1.0])
async def test_sleeping_for_no_time_returns_at_once(clock, seconds):
    before_s = clock.now_s()
    await clock.sleep(seconds)
    assert clock.now_s() - before_s < 1
