"""Turns due within a tick start together, by deadline; frames of sessions are spread."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.clock import SimClock
from sglang_live.orchestrator.metronome import Metronome


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_turns_of_one_tick_start_together_by_their_deadlines():
    clock, went = SimClock(0.01), []
    metronome = Metronome(clock, tick_s=0.04)

    async def wait(name: str, due_s: float) -> None:
        await metronome.tick(due_s)
        went.append(name)

    waiting = [asyncio.create_task(wait(n, s)) for n, s in (("b", 0.5), ("a", 0.2), ("c", 0.9))]
    await settled()
    clock.advance(0.02)
    await settled()
    assert went == []
    clock.advance(0.011)
    await settled()
    assert went == ["a", "b", "c"]
    waiting.append(asyncio.create_task(wait("d", 0.1)))
    await settled()
    clock.advance(0.04)
    await asyncio.gather(*waiting)
    assert went[-1] == "d"


async def test_a_cancelled_wait_delays_no_other():
    clock = SimClock()
    metronome = Metronome(clock, tick_s=0.04)
    gone, stays = (asyncio.create_task(metronome.tick(s)) for s in (0.1, 0.2))
    await settled()
    gone.cancel()
    clock.advance(0.05)
    await stays
    assert gone.cancelled() or gone.cancelling()


@given(st.lists(st.floats(0, 10), max_size=60), st.sampled_from([0.08, 0.16, 0.48, 1.0, 2.0]))
def test_frames_are_spread_over_the_period(arrivals, period_s):
    clock = SimClock()
    metronome = Metronome(clock, tick_s=0.04)
    phases = []
    for n, wait_s in enumerate(arrivals):
        clock.advance(wait_s)
        first_s = metronome.join(f"s{n}", period_s)
        assert 0.08 <= first_s < period_s + 0.08 + 1e-9
        phases.append(round((clock.now_s() + first_s) % period_s / 0.04) % round(period_s / 0.04))
    crowd = Counter(phases)
    n_places = round(period_s / 0.04)
    assert max(crowd.values(), default=0) <= len(arrivals) // n_places + 1


@pytest.mark.parametrize("layer", [0, 1])
def test_frames_of_few_sessions_are_far_apart(layer):
    """The same when every place is taken once."""
    period_s, n_places = 2.0, 50
    metronome = Metronome(SimClock(), tick_s=0.04)
    for n in range(layer * n_places):
        metronome.join(f"there{n}", period_s)
    firsts = sorted(metronome.join(f"s{n}", period_s) for n in range(8))
    gaps = [b - a for a, b in pairwise([*firsts, firsts[0] + period_s])]
    assert min(gaps) >= period_s / 8 / 2 - 0.04


def test_a_place_that_was_left_is_taken_again():
    metronome = Metronome(SimClock(), tick_s=0.04)
    firsts = [metronome.join(f"s{n}", 0.16) for n in range(4)]
    metronome.leave("s1")
    assert metronome.join("new", 0.16) == pytest.approx(firsts[1])
    metronome.leave("unknown")
