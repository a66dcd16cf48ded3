"""The silence that ends a turn: less where its end is more probable, always within its bounds."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.interaction.turn_end import (
    MAX_WAIT_MS,
    PAUSE_MS,
    WEIGHTS,
    TurnEndWeights,
    cutoff_ms,
    judged,
    score_evidence,
    silence_ms,
    trained_weights,
)

EAGER = ("high", "medium", "low")
log_odds = st.floats(-12, 12)
costs_ms = st.floats(10, 100_000)


@given(log_odds, log_odds, costs_ms)
def test_the_wait_falls_as_the_probability_rises(one, other, cost):
    less, more = sorted((one, other))
    weights = trained_weights()
    unlikely, likely = (weights.wait_ms(each, cost) for each in (less, more))
    assert PAUSE_MS <= likely <= unlikely + 1e-6
    assert unlikely <= MAX_WAIT_MS + 1e-6


@given(log_odds, costs_ms, costs_ms)
def test_the_wait_rises_with_the_cost_of_a_cut_off(odds, one, other):
    low, high = sorted((one, other))
    weights = trained_weights()
    assert weights.wait_ms(odds, low) <= weights.wait_ms(odds, high) + 1e-6


@given(log_odds, st.floats(100, 20_000))
def test_the_wait_has_the_least_expected_cost_of_all(odds, cost):
    weights = trained_weights()
    mean, sd = weights.pause_log_mean, weights.pause_log_sd

    def longer(ms: float) -> float:
        return math.erfc((math.log(ms) - mean) / (sd * math.sqrt(2))) / 2

    def expected(ms: float) -> float:
        return math.exp(odds) * ms**2 + cost**2 * longer(ms) / longer(PAUSE_MS)

    best = min(map(expected, np.linspace(PAUSE_MS, MAX_WAIT_MS, 600)))
    assert expected(weights.wait_ms(odds, cost)) <= best * (1 + 1e-9)


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_higher_score_is_no_less_evidence(one, other):
    low, high = sorted((one, other))
    assert score_evidence(low) <= score_evidence(high)


def test_vague_scores_are_no_evidence():
    assert score_evidence(0.1) == score_evidence(0.5) == score_evidence(0.9) == 0.0
    assert score_evidence(0.001) < 0 < score_evidence(0.999)


@pytest.mark.parametrize("eagerness", [*EAGER, "auto"])
def test_a_sure_end_is_waited_for_less_than_one_that_is_not(eagerness):
    cost = cutoff_ms(eagerness)
    sure, vague, unlikely = (judged(score, cost) for score in (0.9999, 0.5, 0.0))
    assert sure.wait_ms < vague.wait_ms < unlikely.wait_ms
    assert (sure.likely, vague.likely, unlikely.likely) == (True, True, False)
    assert vague.wait_ms == silence_ms(cost)


def test_eagerness_shortens_the_wait():
    for score in (0.0, 0.5, 1.0):
        waits = [judged(score, cutoff_ms(each)).wait_ms for each in EAGER]
        assert waits == sorted(waits) and waits[0] <= waits[1] < waits[2]
    assert cutoff_ms("auto") == cutoff_ms("medium")


def test_the_weights_say_what_they_were_fitted_to():
    document = json.loads(WEIGHTS.read_text())
    assert {"what", "data", "licences", "pauses", "ends", "groups"} <= document.keys()
    weights = TurnEndWeights(**document["weights"])
    assert weights.score > 0 and weights.bias < 0
    assert set(weights.cutoff_ms) == {*EAGER, "auto"}
