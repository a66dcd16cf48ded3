import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_live.extensions.planner.simulation.load.arrivals import plan_users
from sglang_live.extensions.planner.simulation.load.interruptions import (
    InterruptionModel,
    load_response_durations,
)
from sglang_live.extensions.planner.simulation.workload import RESPONSE_DURATIONS

MODEL = InterruptionModel(
    barge_in=0.5,
    false_triggers=0.1,
    response_durations_s=np.array([2.0, 8.0]),
    sounds=("cough", "noise"),
)


def plan(model=MODEL, **changes):
    drawn = {
        "n_users": 100,
        "n_turns": 8,
        "clips": ["a", "b"],
        "response_gaps_s": np.array([0.0, 1.0]),
        "seed": 1,
        "repeat": 0,
        "open_loop_rps": None,
        "arrival_shape": 1.0,
        "interruptions": model,
    }
    return plan_users(**{**drawn, **changes})


def kinds(plans) -> list[str | None]:
    turns = [turn for user in plans for turn in user.turns]
    return [turn.interruption and turn.interruption.kind for turn in turns]


def test_the_same_seed_draws_the_same_interruptions():
    assert plan() == plan()
    assert kinds(plan()) != kinds(plan(seed=2))
    assert kinds(plan()) != kinds(plan(repeat=1))


def test_interruptions_change_neither_utterances_nor_pauses():
    def said(plans):
        return [[(t.clip, t.response_gap_s) for t in user.turns] for user in plans]

    assert said(plan()) == said(plan(model=None))


def test_a_larger_share_only_adds_barge_ins():
    few, many = kinds(plan(replace(MODEL, barge_in=0.3))), kinds(plan(replace(MODEL, barge_in=0.7)))
    assert all(b == a for a, b in zip(few, many, strict=True) if a is not None)
    assert many.count("barge_in") > few.count("barge_in")


def test_shares_are_as_configured_and_the_last_turn_is_not_interrupted():
    plans = plan()
    found = kinds(plans)
    assert found.count("false_trigger") / len(found) == pytest.approx(0.1, abs=0.03)
    assert found.count("barge_in") / (700 * 0.9) == pytest.approx(0.5, abs=0.06)
    last = [user.turns[-1].interruption for user in plans]
    assert all(turn is None or turn.kind == "false_trigger" for turn in last)
    assert kinds(plan(replace(MODEL, barge_in=0.0, false_triggers=0.0))) == [None] * 800


def test_interruptions_are_uniform_within_a_response():
    turns = [turn.interruption for user in plan() for turn in user.turns]
    cuts_s = [turn.after_s for turn in turns if turn is not None]
    assert min(cuts_s) >= 0
    assert max(cuts_s) < 8
    # Half of the cuts are spread over 2 s, half over 8 s: on average 1 s and 4 s.
    assert np.mean(cuts_s) == pytest.approx(2.5, abs=0.4)
    assert {turn.sound for turn in turns if turn and turn.kind == "false_trigger"} == {
        "cough",
        "noise",
    }


def test_the_bundled_durations_can_be_drawn_from():
    durations_s = load_response_durations(RESPONSE_DURATIONS)
    assert len(durations_s) == 108
    assert 2 < np.median(durations_s) < 10


@pytest.mark.parametrize("content", [{}, {"durations_s": []}, {"durations_s": [1, -1]}, []])
def test_a_file_without_durations_is_a_clear_error(tmp_path, content):
    path = tmp_path / "durations.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"durations\.json"):
        load_response_durations(path)
