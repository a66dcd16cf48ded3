"""The fits of turn_end.json recover what their data was drawn from."""

import math

import numpy as np
import pytest

from benchmark.turn_taking.cutting import Unit
from sglang_live.interaction.turn_end import PAUSE_MS
from training.turn_end.__main__ import CALLS
from training.turn_end.fit import cutoff_costs, figures, fitted, held_back, log_normal, logistic
from training.turn_end.pauses import JudgedPause, _turns, fade_db, read_pauses
from training.turn_end.worth import auc_between


def pause(is_end: bool, lasts_ms: float = 500.0, score: float = 0.5, **fields) -> JudgedPause:
    given = {
        "group": "g",
        "source": "calls",
        "late_score": None,
        "fade_db": 0.0,
        "turn_ms": 1000.0,
        "weight": 1.0,
    }
    return JudgedPause(is_end=is_end, lasts_ms=lasts_ms, score=score, **given | fields)


def test_the_logistic_fit_finds_the_weights_of_its_data():
    rng = np.random.default_rng(0)
    columns = np.column_stack((np.ones(20_000), rng.normal(0, 1, 20_000)))
    is_end = (rng.random(20_000) < 1 / (1 + np.exp(1 - 0.7 * columns[:, 1]))).astype(float)
    bias, slope = logistic(columns, is_end, np.ones(20_000))
    assert (bias, slope) == (pytest.approx(-1, abs=0.05), pytest.approx(0.7, abs=0.05))


def test_the_fit_of_lengths_knows_that_short_ones_are_not_seen():
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(6.0, 0.8, 20_000))
    seen = lengths[lengths >= PAUSE_MS]
    mean, sd = log_normal(seen, np.ones(len(seen)))
    assert (mean, sd) == (pytest.approx(6.0, abs=0.05), pytest.approx(0.8, abs=0.05))


def test_figures_count_what_a_wait_cuts_off_and_how_late_it_is():
    pauses = [pause(False, 400), pause(False, 900), pause(True, 5000)]
    found = figures([(p, 600.0) for p in pauses])
    assert found["false_cutoffs"] == 0.5
    assert found["delay_p50_ms"] == found["delay_p90_ms"] == found["delay_mean_ms"] == 600


def test_eagerness_cuts_off_as_much_as_its_silence():
    rng = np.random.default_rng(0)
    pauses = [
        pause(False, float(np.exp(rng.normal(6.3, 0.8)) + PAUSE_MS), score, group=group)
        for group in "abc"
        for score in rng.random(200)
    ]
    pauses += [pause(True, 5000, score, group=g) for g in "abc" for score in rng.random(60)]
    costs = cutoff_costs(held_back(pauses))
    assert costs["high"] < costs["medium"] == costs["auto"] < costs["low"]


def test_a_group_is_judged_by_weights_that_have_not_seen_it():
    near, far = (
        [pause(False, ms, group=g) for _ in range(30)] + [pause(True, 5000, group=g)] * 9
        for g, ms in (("near", 300), ("far", 2000))
    )
    of = {p.group: weights.pause_log_mean for p, weights in held_back(near + far)}
    assert of["near"] > of["far"]


def test_the_pauses_of_the_calls_are_kept():
    pauses = read_pauses(CALLS)
    assert {p.group for p in pauses} == {"Auto_Repairs_40_UTC", "Auto_Repairs_49_UTC"}
    weights = fitted(pauses, {})
    assert weights.bias < 0 < weights.score
    found = auc_between(pauses, {id(p): p.score for p in pauses})
    assert found["interval"][0] <= found["auc"] <= found["interval"][1]


def test_a_voice_that_fades_is_softer_at_its_end():
    loud = (8000 * np.sin(np.arange(16_000) / 5)).astype(np.int16)
    faded = np.concatenate((loud, loud[:1600] // 10))
    assert fade_db(loud) == pytest.approx(0, abs=0.5)
    assert fade_db(faded) == pytest.approx(-20, abs=0.5)
    assert fade_db(loud[:800]) == 0.0


def test_a_turn_of_a_call_ends_where_the_other_speaker_begins():
    units = [Unit("customer", 0, 1000), Unit("customer", 1500, 2000), Unit("agent", 2500, 4000)]
    units.append(Unit("customer", 4500, 6000))
    first, second = _turns(units, "customer", 9000)
    assert (first.end_ms, first.until_ms, len(first.pauses)) == (2000, 4500, 1)
    assert (second.end_ms, second.until_ms) == (6000, 9000)
    assert math.isclose(first.pauses[0].lasts_ms, 500)
