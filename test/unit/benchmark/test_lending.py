"""The command of benchmark.lending: arms in turn, a line and a row for each."""

import json
import sys
from types import SimpleNamespace

import pytest

from benchmark.lending import __main__ as lending

TIMES = {"n": 1, "p50": 20.0, "p90": 30.0, "p99": None, "max": 40.0}
SPEAKERS = {"wrong": 0, "n": 3, "ttfp_ms_p50": 50.0, "gap_ms_p99": 10.0}


def row_of(arm: str) -> dict:
    return {
        "arm": arm,
        "turns": 4,
        "warm_turns": 3,
        "recomputed_tokens": 7,
        "ttft_ms": {"all": TIMES, "typed": TIMES, "spoken": TIMES},
        "thinker_gap_ms": TIMES,
        "leases_returned": 0,
        "recall_ms_p99": 0.0,
        "lender": SPEAKERS,
    }


@pytest.fixture
def measured(monkeypatch):
    """Arms that were measured, with their place."""
    calls = []

    async def measure(arm, options, schedule, place):
        assert schedule.accesses
        calls.append((arm, place))
        return row_of(arm)

    monkeypatch.setattr(lending, "measure", measure)
    return calls


def test_each_repeat_measures_every_arm_on_the_modelled_links(measured, monkeypatch, tmp_path):
    path = tmp_path / "rows.json"
    words = ["--arms", "host,peer", "--repeats", "2", "--sessions", "3", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["lending", *words])
    lending.main()
    assert [arm for arm, _ in measured] == ["host", "peer"] * 2
    assert {place.device_model for _, place in measured} == {lending.Options().device_model}
    document = json.loads(path.read_text())
    assert [(row["repeat"], row["arm"]) for row in document["rows"]] == [
        (0, "host"),
        (0, "peer"),
        (1, "host"),
        (1, "peer"),
    ]


def test_engines_get_the_places_devices_and_arguments(monkeypatch):
    """Up to the engines themselves, which are not started here."""
    asked = {}

    def running_pair(policies, thinker_args, talker_args, device_model, **more):
        asked.update(more, thinker=thinker_args, talker=talker_args, model=device_model)
        raise InterruptedError

    monkeypatch.setattr(lending, "running_pair", running_pair)
    options = lending.Options(sessions=3, max_turns=2)
    place = lending.Place(
        device_model="", devices=("cuda:0",) * 2, engine_args={"dtype": "float32"}
    )
    measuring = lending.measure("peer", options, lending.schedule_of(options), place)
    with pytest.raises(InterruptedError):
        measuring.send(None)
    found = SimpleNamespace(**asked)
    assert found.model == "" and found.devices == ("cuda:0", "cuda:0")
    assert found.lends and not found.elastic
    assert found.thinker["dtype"] == found.talker["dtype"] == "float32"
    assert found.thinker["enable_hierarchical_cache"] and found.thinker["max_total_tokens"] > 0
