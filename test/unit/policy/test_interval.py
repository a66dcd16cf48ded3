"""The interval between decode rounds: only for streams that are heard, only on a shared device."""

import numpy as np
import pytest

from sglang_live.policy.config import TALKER, PolicyConfig

from .views import free_index, paused, playing, policy_of, starting, view_of, waiting

INTERVAL_S = TALKER.pacing.interval_steps * TALKER.stage.step_s


def interval_s(*streams, policies: str = "pacing", config: PolicyConfig = TALKER, **facts) -> float:
    return policy_of(policies.split("+"), config).decide(view_of(*streams, **facts)).interval_s


@pytest.mark.parametrize("stream", [playing(0.1), playing(5.0), starting(), paused(3.0)])
def test_rounds_of_streams_that_are_heard_have_an_interval(stream):
    assert interval_s(stream, playing(1.0)) == pytest.approx(INTERVAL_S)


def test_a_stream_keeps_ahead_of_its_listener_at_that_interval():
    assert TALKER.stage.step_s >= 2 * INTERVAL_S


@pytest.mark.parametrize("unheard", [playing(1.0, managed=False), playing(np.nan)])
def test_a_stream_without_a_listener_is_decoded_as_fast_as_the_device_can(unheard):
    assert interval_s(unheard, playing(1.0)) == 0.0


@pytest.mark.parametrize(
    "absent",
    [
        waiting(managed=False),
        playing(1.0, managed=False, blocked=True),
        free_index(),
    ],
)
def test_a_stream_that_cannot_step_does_not_matter(absent):
    assert interval_s(absent, playing(1.0)) == pytest.approx(INTERVAL_S)


def test_a_device_of_its_own_has_no_interval():
    assert interval_s(playing(1.0), config=TALKER.changed({"pacing.interval_steps": 0.0})) == 0.0


@pytest.mark.parametrize(
    ("streams", "facts"),
    [([playing(1.0)], {"kv_wanted": True}), ([playing(1.0), waiting(100)], {"free_tokens": 50})],
)
def test_streams_whose_memory_is_waited_for_have_none(streams, facts):
    assert interval_s(*streams, **facts) == 0.0
    # The listeners of a later stage need the device.
    later = interval_s(*streams, **facts, peer_urgent=True)
    assert later == pytest.approx(INTERVAL_S)


@pytest.mark.parametrize("policies", ["urgency", "deadline", "fcfs"])
def test_it_belongs_to_pacing(policies):
    assert interval_s(playing(1.0), policies=policies) == 0.0


def test_the_interval_follows_the_models_step():
    config = TALKER.changed({"stage.step_s": 0.0122})
    assert interval_s(playing(1.0), config=config) == pytest.approx(0.375 * 0.0122)
