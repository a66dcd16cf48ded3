import json

import numpy as np
import pytest

from sglang_live.extensions.planner.simulation.load.arrivals import (
    ResponseLengths,
    gamma_arrivals,
    load_response_gaps,
    plan_users,
)
from sglang_live.extensions.planner.simulation.workload import RESPONSE_GAPS


def plan(**changes):
    drawn = {
        "n_users": 4,
        "n_turns": 3,
        "clips": ["a", "b", "c"],
        "response_gaps_s": np.array([0.0, 0.5, 1.0]),
        "seed": 1,
        "repeat": 0,
        "open_loop_rps": None,
        "arrival_shape": 1.0,
    }
    return plan_users(**{**drawn, **changes})


def test_the_same_seed_draws_the_same_users():
    assert plan() == plan()
    assert plan() != plan(seed=2)
    assert plan() != plan(repeat=1)


def test_a_larger_point_only_adds_users():
    assert plan(n_users=8)[:4] == plan(n_users=4)


def test_an_open_loop_changes_arrival_times_not_utterances():
    closed, opened = plan(), plan(open_loop_rps=2.0)
    assert [user.turns for user in closed] == [user.turns for user in opened]
    assert [c.start_s for c in closed] != [c.start_s for c in opened]


def test_every_user_has_all_its_turns():
    for user in plan():
        assert len(user.turns) == 3
        assert all(turn.clip in "abc" for turn in user.turns)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_arrivals_keep_the_rate_at_any_shape(shape):
    times_s = gamma_arrivals(20_000, 5.0, shape, np.random.default_rng(0))
    spacings_s = np.diff(times_s)
    assert (spacings_s >= 0).all()
    assert np.mean(spacings_s) == pytest.approx(1 / 5, rel=0.05)
    # Coefficient of variation of a gamma distribution: 1 / sqrt(shape).
    assert np.std(spacings_s) / np.mean(spacings_s) == pytest.approx(shape**-0.5, rel=0.05)


def test_arrivals_of_a_trace_keep_the_rate_and_its_bursts():
    counts = np.array([0] * 9 + [10])
    times_s = [user.start_s for user in plan(n_users=400, open_loop_rps=2.0, second_counts=counts)]
    assert times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(200.0, rel=0.1)
    # Ten in a second of the trace, which lasts half a second here, and none in the nine others.
    spacings_s = np.diff(times_s)
    assert np.count_nonzero(spacings_s < 0.5) >= 0.85 * len(spacings_s)
    assert np.std(spacings_s) / np.mean(spacings_s) > 2.0


def test_a_trace_of_few_arrivals_is_long_enough():
    assert len(plan(n_users=3, open_loop_rps=1.0, second_counts=np.array([0] * 99 + [1]))) == 3


def test_overlaps_become_a_gap_of_zero(tmp_path):
    path = tmp_path / "fto.json"
    path.write_text(json.dumps({"fto_s": [-0.5, 0.0, 0.25]}))
    assert load_response_gaps(path).tolist() == [0.0, 0.0, 0.25]


def test_the_bundled_offsets_match_the_published_quantiles():
    gaps_s = load_response_gaps(RESPONSE_GAPS)
    assert len(gaps_s) == 367
    assert np.percentile(gaps_s, [50, 75, 90]) == pytest.approx([0.09, 0.44, 1.02], abs=0.04)


def test_response_lengths_are_drawn_independently_of_other_draws():
    def plans(lengths):
        return plan_users(
            n_users=2,
            n_turns=3,
            clips=["a", "b"],
            response_gaps_s=np.array([0.1, 0.2]),
            seed=1,
            repeat=0,
            open_loop_rps=None,
            arrival_shape=1.0,
            response_lengths=lengths,
        )

    drawn = plans(ResponseLengths(np.array([1.6, 3.2])))
    assert {turn.response_tokens for plan in drawn for turn in plan.turns} <= {20, 40}
    assert drawn == plans(ResponseLengths(np.array([1.6, 3.2])))
    for plan, free in zip(drawn, plans(None), strict=True):
        assert [t.clip for t in plan.turns] == [t.clip for t in free.turns]
        assert all(turn.response_tokens is None for turn in free.turns)
