"""Admission beside brute force on a simulated server: few users, so that it takes seconds."""

import json
from dataclasses import replace

import pytest

from benchmark.simulate import admission
from sglang_live.extensions.planner.simulation.load.arrivals import PlannedTurn, UserPlan
from sglang_live.extensions.planner.simulation.load.interruptions import PlannedInterruption
from sglang_live.extensions.planner.simulation.run import ADMITTED, Arm


@pytest.fixture(scope="module")
def experiment() -> admission.Experiment:
    argv = ["--seconds", "60", "--seeds", "1", "--turns", "3"]
    return admission.Experiment(admission.parse_args(argv))


def test_the_admitted_arm_has_every_policy():
    assert Arm.parse(ADMITTED).policies.admission and not Arm.parse("all").policies.admission
    assert replace(Arm.parse(ADMITTED).policies, admission=False) == Arm.parse("all").policies


def test_a_session_ends_after_its_turns_and_its_last_is_not_interrupted():
    cut = PlannedInterruption("barge_in", 1.0)
    plan = UserPlan(0, 5.0, tuple(PlannedTurn("clip", 0.3, cut, 10) for _ in range(4)))
    begun = admission._begun(plan, 2.0, 3)
    assert begun.start_s == 2.0
    assert [turn.interruption for turn in begun.turns] == [cut, cut, None]


def test_admission_holds_the_sessions_below_what_arrives(experiment):
    found = experiment.steady(ADMITTED, 30)
    free = experiment.steady("all", 30)
    # It begins with a limit of 16 and has risen since; twice 30 arrive.
    assert 16 < found.users_most < free.users_most
    assert found.users <= found.limit < 1024 and found.refused > 0.05 > free.refused == 0


@pytest.mark.parametrize("highest", [30, 47, 119])
def test_a_constant_limit_is_the_highest_within_the_target(experiment, monkeypatch, highest):
    """Of 30, which are taken to be within it, to 119: 120 come."""
    served = experiment.steady("all", 4)

    def steady(arm, n_star, most):
        p90_ms = 400.0 if most <= highest else 4_000.0
        return replace(served, arm=arm, users_most=most, p90_ms=p90_ms)

    monkeypatch.setattr(experiment, "steady", steady)
    best = experiment.constant_limit(60)
    assert (best.arm, best.users_most, best.p90_ms) == ("constant limit", highest, 400.0)


def test_a_storm_is_refused_in_part(experiment):
    found = experiment.storms(ADMITTED, 30)
    assert found.users_most <= 60 and found.continuous > 0.9


@pytest.mark.parametrize(
    ("load", "seconds", "arms"),
    [("steady", 20, ["constant limit", ADMITTED]), ("storms", 91, ["off", "all", ADMITTED])],
)
def test_the_document_has_every_arm(tmp_path, capsys, load, seconds, arms):
    path = tmp_path / "found.json"
    argv = ["--load", load, "--seconds", str(seconds), "--seeds", "1", "--turns", "2"]
    assert admission.main([*argv, "--served", "4", "--json", str(path)]) == 0
    assert f"| {load} | `{arms[-1]}` |" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["brute_force"] == 4
    assert [one["arm"] for one in document[load]] == arms


@pytest.mark.parametrize("argv", [["--seconds", "0"], ["--seeds", "0"], ["--storm", "-1"]])
def test_flags_are_checked(argv):
    with pytest.raises(SystemExit):
        admission.parse_args(argv)
