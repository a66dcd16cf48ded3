"""Calls on a modelled device: what bounds their number."""

import json

import pytest

from benchmark.duplex import CALLS, MODEL
from sglang_live.extensions.planner import __main__ as planner
from sglang_live.extensions.planner.calls import WINDOWS, most_calls, simulate, tick_s
from sglang_live.extensions.planner.device_model.model import SpeechModel, load_speech_model

PLAN = ["--device-model", str(MODEL), "--gpu-gib", "74.5", "--model-path", "kyutai/moshiko"]


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return load_speech_model(MODEL)


def test_a_call_alone_waits_for_a_tick_and_for_its_own_step(model):
    row = simulate(model, "context", 1, 20.0, 1, model.memory_gb)
    step_ms = 1000 * tick_s(model, 1, WINDOWS["context"] + 64)
    assert step_ms < row.p50_ms < row.p99_ms < step_ms + 40
    assert (row.missed, row.fits) == (0.0, True)


def test_memory_and_time_bound_the_calls_and_a_window_moves_both(model):
    most = {}
    for window in WINDOWS:
        rows = [simulate(model, window, n, 10.0, 1, model.memory_gb) for n in CALLS]
        most[window] = max(row.n_calls for row in rows if row.fits and row.missed < 0.01)
        missed = [row.missed for row in rows]
        assert missed[0] == 0.0 and missed[-1] > 0.9
    held = {name: most_calls(model, n, model.memory_gb) for name, n in WINDOWS.items()}
    assert 30 <= most["context"] <= held["context"] < 40
    assert 100 <= most["minute"] <= held["minute"] < 140


def test_the_planner_reads_the_device_model_of_such_a_model(capsys):
    assert planner.main([*PLAN, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    context, minute = document["windows"]
    assert context["n_calls"] == context["n_in_memory"] < context["n_in_time"]
    assert minute["n_calls"] == minute["n_in_time"] < minute["n_in_memory"]
    assert context["n_calls"] < minute["n_calls"] and minute["p99_ms"] <= 80
    assert planner.main([*PLAN, "--gpus", "2", "--price", "3"]) == 0
    told = capsys.readouterr().out
    assert f"{2 * minute['n_calls']} calls, {minute['n_calls']} per GPU" in told
    assert f"{3 / minute['n_calls']:.4f} for an hour" in told


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([*PLAN, "--talk-s", "3"], "--talk-s is about turns"),
        (PLAN[:4], "--model-path must name the model"),
        ([*PLAN[:2], "--model-path", "x"], "needs --gpu-gib"),
    ],
)
def test_what_is_about_turns_is_refused(argv, why, capsys):
    with pytest.raises(SystemExit):
        planner.main(argv)
    assert why in capsys.readouterr().err
