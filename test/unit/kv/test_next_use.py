"""When a session's KV is needed again."""

import pytest

from sglang_live.kv.next_use import NextUse, NextUseConfig

CONFIG = NextUseConfig(first_gap_s=1.0, utterance_s=2.0, gap_weight=0.5, max_gap_s=10.0)


def test_it_is_the_end_of_playback_and_then_gap_and_utterance():
    uses = NextUse(CONFIG)
    uses.plays_until("s", 50.0)
    assert uses.expected("s") == 50.0 + 1.0 + 2.0


def test_a_users_own_gap_has_priority_over_that_of_the_workload():
    uses = NextUse(CONFIG)
    for session in ("slow", "new"):
        uses.plays_until(session, 50.0)
    uses.set_user_gap("slow", 7.0)
    assert uses.expected("slow") == 59.0
    assert uses.expected("new") == 53.0
    uses.set_user_gap("slow", None)
    assert uses.expected("slow") == 53.0


def test_the_gap_of_the_workload_is_a_moving_average():
    uses = NextUse(CONFIG)
    uses.plays_until("s", 50.0)
    uses.observe_gap(3.0)
    assert uses.workload_gap_s == 2.0
    assert uses.expected("s") == 54.0


def test_a_long_absence_counts_as_the_maximum_and_an_overlap_as_no_gap():
    uses = NextUse(CONFIG)
    uses.observe_gap(3600.0)
    assert uses.workload_gap_s == 5.5
    uses.observe_gap(-2.0)
    assert uses.workload_gap_s == 2.75


def test_without_playback_nothing_is_known():
    uses = NextUse(CONFIG)
    assert uses.expected("unknown") is None
    uses.set_user_gap("s", 1.0)
    assert uses.expected("s") is None
    uses.plays_until("s", 50.0)
    uses.plays_until("s", None)
    assert uses.expected("s") is None


def test_a_forgotten_session_has_no_estimate():
    uses = NextUse(CONFIG)
    uses.plays_until("s", 50.0)
    uses.forget("s")
    uses.forget("s")
    assert uses.expected("s") is None


@pytest.mark.parametrize("bad", [{"gap_weight": 0.0}, {"gap_weight": 1.1}, {"utterance_s": -1.0}])
def test_bad_constants_are_refused(bad):
    with pytest.raises(ValueError):
        NextUseConfig(**bad)


@pytest.mark.parametrize(
    "edge", [{"gap_weight": 1.0}, {"first_gap_s": 0.0, "utterance_s": 0.0, "max_gap_s": 0.0}]
)
def test_constants_at_their_bounds_are_accepted(edge):
    assert NextUseConfig(**edge)


@pytest.mark.parametrize("name", ["first_gap_s", "utterance_s", "max_gap_s"])
@pytest.mark.parametrize("value", [-0.5, float("inf"), float("nan")])
def test_times_are_finite_and_not_negative(name, value):
    with pytest.raises(ValueError, match=name):
        NextUseConfig(**{name: value})
