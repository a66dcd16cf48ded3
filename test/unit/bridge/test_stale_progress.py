"""A report that is too old says nothing: its stream is unknown, and known again with the next."""

import math

import pytest

from sglang_live.bridge.stream_table import SILENT_CONSUMER_S
from sglang_live.messages import HeardOfMany
from sglang_live.orchestrator.turn_control import REPORT_EVERY_S

from .test_rounds import Engine

ROUND_S = 0.02


def report(engine: Engine, rid: str, heard_s: float, advancing: bool) -> None:
    engine.rounds.progress(HeardOfMany.of([rid], [heard_s], [advancing]))


def run_s(engine: Engine, seconds: float) -> list[bool]:
    """Whether request "a" was paused, in each round."""
    paused = []
    for _ in range(round(seconds / ROUND_S)):
        engine.run(1)
        paused.append(engine.rounds.pause("a"))
    return paused


@pytest.fixture(params=["urgency", "deadline", "fcfs"])
def engine(request) -> Engine:
    engine = Engine(request.param, "pacing")
    engine.add("a")
    engine.run(1)
    return engine


def test_a_stream_whose_only_report_said_that_nothing_plays_does_not_starve(engine):
    report(engine, "a", 0.0, False)
    paused = run_s(engine, 60.0)
    n_silent = round(SILENT_CONSUMER_S / ROUND_S) + 1
    assert any(paused[:n_silent]), "while the report counted"
    assert not any(paused[n_silent:])
    totals = engine.rounds.report()
    assert totals["stale"] == totals["unknown"] > 0.9 * len(paused[n_silent:])


def test_a_stream_whose_latest_report_said_that_it_plays_is_not_urgent_for_good(engine):
    report(engine, "a", 100.0, True)
    engine.run(2)
    assert engine.notes()[-1] == ("a", "u0") and engine.rounds.urgent
    run_s(engine, SILENT_CONSUMER_S + 0.1)
    assert engine.notes() == [("a", "unknown")]
    assert not engine.rounds.urgent
    assert engine.rounds.gap_at_s == math.inf


def test_a_stream_is_known_again_when_reports_return(engine):
    report(engine, "a", 0.0, False)
    run_s(engine, 10.0)
    assert engine.notes()[-2:] == [("a", "unknown"), ("a", "resumed")]
    report(engine, "a", 0.0, False)
    engine.run(1)
    assert ("a", "u2") in engine.notes()
    assert engine.rounds.pause("a")


def test_repeated_reports_keep_a_stream_known(engine):
    heard_s = 0.0
    for _ in range(40):
        report(engine, "a", heard_s, True)
        run_s(engine, REPORT_EVERY_S)
        heard_s += REPORT_EVERY_S
    totals = engine.rounds.report()
    assert totals["stale"] == totals["unknown"] == 0


def test_a_paused_engine_wakes_when_a_report_becomes_too_old(engine):
    report(engine, "a", 0.0, False)
    while not engine.rounds.pause("a"):
        engine.run(1)
    passed_s = engine.now_s - 100.0
    assert engine.rounds.wait_limit_s() <= SILENT_CONSUMER_S - passed_s + 3 * ROUND_S


def test_the_reports_of_others_do_not_refresh_a_stream(engine):
    engine.add("b")
    engine.run(1)
    report(engine, "a", 0.0, False)
    for n in range(10):
        report(engine, "b", float(n), True)
        run_s(engine, 1.0)
    assert ("a", "unknown") in engine.notes()
    assert engine.rounds.table.n_stale == 1


def test_a_stream_without_a_listener_has_no_report_that_could_be_old():
    engine = Engine("urgency", "pacing")
    engine.add("plain", managed=False)
    report(engine, "plain", 0.0, False)
    run_s(engine, 20.0)
    assert engine.rounds.report()["stale"] == 0
    assert engine.rounds.table.stale_at_s == math.inf
