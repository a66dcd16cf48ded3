"""Turns on a shared device: one holder, no lost grant, no starvation."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.policy.arbiter import (
    FIRST_LAUNCH_S,
    ArbiterConfig,
    Turns,
    engine_deadline_s,
    lead_s,
    next_launch_s,
)

CONFIG = ArbiterConfig()


def test_the_earliest_deadline_is_next_and_of_equal_ones_the_first_to_ask():
    turns: Turns[str] = Turns()
    assert turns.next() is None
    for who, deadline_s in (("talker", 2.0), ("vocoder", 1.0), ("thinker", 1.0)):
        turns.ask(who, deadline_s)
    assert turns.next() == "vocoder"
    assert turns.next() is None, "it is not free"
    turns.release("vocoder")
    turns.ask("talker", 0.5)  # something came meanwhile
    assert turns.next() == "talker"


def test_who_leaves_frees_the_device_and_is_not_granted():
    turns: Turns[str] = Turns()
    turns.ask("a", 1.0)
    turns.ask("b", 2.0)
    assert turns.next() == "a"
    turns.leave("b")
    turns.leave("a")
    assert turns.holder is None and turns.next() is None


def test_what_cannot_be_is_refused_and_changes_nothing():
    turns: Turns[str] = Turns()
    turns.ask("a", 1.0)
    assert turns.next() == "a"
    for call in (
        lambda: turns.ask("a", 2.0),
        lambda: turns.ask("b", math.inf),
        lambda: turns.ask("b", math.nan),
        lambda: turns.release("b"),
    ):
        with pytest.raises(ValueError, match=r"device|deadline"):
            call()
    assert turns.holder == "a"
    turns.release("a")
    assert turns.next() is None


@pytest.mark.parametrize(
    ("gap_at_s", "first", "expected"),
    [
        (math.inf, False, 10.0 + CONFIG.unheard_s),
        (math.inf, True, 10.0 + CONFIG.first_sound_s),
        (10.2, False, 10.2 + CONFIG.ease_s),
        (10.2, True, 10.0 + CONFIG.first_sound_s),
        (9.0, True, 9.0 + CONFIG.ease_s),
        (99.0, False, 10.0 + CONFIG.unheard_s),
    ],
)
def test_an_engines_deadline(gap_at_s, first, expected):
    assert engine_deadline_s(10.0, gap_at_s, first, CONFIG) == pytest.approx(expected)


@settings(derandomize=True, max_examples=200)
@given(st.data())
def test_no_grant_is_lost_and_every_wait_ends(data):
    """Askers come, leave and change their minds; each piece of work takes 10 ms. No one asks for
    a time that has passed, as stages do not but for what is late already."""
    turns: Turns[int] = Turns()
    asked_s: dict[int, float] = {}  # the deadline with which each one first asked
    now_s = 0.0
    for _ in range(60):
        who = data.draw(st.integers(0, 4))
        if data.draw(st.sampled_from(("ask", "ask", "work", "leave"))) == "ask":
            if who != turns.holder:
                deadline_s = now_s + data.draw(st.sampled_from((0.0, 0.05, 0.1, 0.5)))
                deadline_s = min(deadline_s, asked_s.get(who, math.inf))
                turns.ask(who, deadline_s)
                asked_s[who] = deadline_s
        elif data.draw(st.booleans()):
            turns.leave(who)
            asked_s.pop(who, None)
        elif turns.holder is not None:
            now_s += 0.01
            turns.release(turns.holder)
        was_free = turns.holder is None
        granted = turns.next()
        assert (granted is not None) == (was_free and bool(asked_s)), "a free device is granted"
        if granted is not None:
            # No one overtakes who is due earlier, so the wait ends with the work that was due
            # before, however much comes later.
            assert asked_s.pop(granted) <= min(asked_s.values(), default=math.inf)


def test_the_lead_covers_the_launch_of_the_slowest_stage():
    assert lead_s([]) > FIRST_LAUNCH_S
    assert lead_s([0.001, 0.004]) == pytest.approx(0.005)
    mean_s = FIRST_LAUNCH_S
    for _ in range(100):
        mean_s = next_launch_s(mean_s, 0.004)
    assert mean_s == pytest.approx(0.004, rel=0.01)
    assert next_launch_s(0.004, 30.0) < 0.005  # a kernel was compiled
