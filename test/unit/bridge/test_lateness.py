"""The lateness of rounds, and the waits of streams that it is measured by."""

from types import SimpleNamespace

import pytest

from sglang_live.bridge.lateness import Lateness
from sglang_live.bridge.stream_table import StreamTable
from sglang_live.policy.view import UNMEASURED_LATE_S, StageRates


def of(*rounds_s: float) -> float:
    lateness = Lateness()
    for late_s in rounds_s:
        lateness.take(late_s)
    return lateness.p99_s


def test_few_rounds_say_nothing():
    assert of(*[1.0] * 100) == UNMEASURED_LATE_S


def test_one_round_in_a_hundred_is_later():
    assert of(*[0.0] * 126, 1.0, 1.0) == 1.0
    assert of(*[0.01] * 255, 1.0) == 0.01
    assert of(*[0.01] * 253, *[0.3] * 3) == 0.3


def test_rounds_that_are_early_are_in_time():
    assert of(*[-0.01] * 128) == 0.0


def test_faults_of_the_machine_are_not_counted():
    assert of(*[0.01] * 128, *[5.0] * 128) == 0.01


def test_rounds_of_long_ago_are_forgotten():
    assert of(*[0.5] * 4096) == 0.5
    assert of(*[0.5] * 4096, *[0.01] * 4096) == 0.01


# --- what a round's streams have waited ---


@pytest.fixture
def table() -> StreamTable:
    table = StreamTable(0.08)
    for rid, at_s in (("a", 10.0), ("b", 10.5)):
        table.wait(rid, now_s=at_s, managed=True, prompt_tokens=30, prefill_tokens=20)
        table.admit(rid, at_s + 0.1)
    return table


def waited_s(table: StreamTable, now_s: float, *rids: str) -> float:
    table.step([SimpleNamespace(rid=rid) for rid in rids], now_s)
    return table.waited_s


def test_the_stream_that_waited_longest_counts(table):
    assert waited_s(table, 10.7, "a", "b") == pytest.approx(0.6)  # a was admitted at 10.1
    assert waited_s(table, 10.8, "b") == pytest.approx(0.1)
    assert waited_s(table, 11.0, "a", "b") == pytest.approx(0.3)


def test_a_paused_stream_waits_from_where_it_resumes(table):
    waited_s(table, 11.0, "a", "b")
    table.pause("a", 11.1)
    assert waited_s(table, 11.2, "b") == pytest.approx(0.2)
    table.resume("a", 13.0)
    assert waited_s(table, 13.0, "b") == pytest.approx(1.8)
    assert waited_s(table, 13.05, "a", "b") == pytest.approx(0.05)


def test_a_stream_that_cannot_step_does_not_wait(table):
    waited_s(table, 11.0, "a", "b")
    facts = {"occupancy": 0.5, "free_tokens": 100, "free_rows": 4, "prefill_running": False}
    table.view(now_s=12.0, rates=StageRates(), blocked=["a", "b"], **facts)
    assert waited_s(table, 12.2, "a", "b") == pytest.approx(0.2)


def test_requests_that_are_not_in_the_table_wait_for_nothing(table):
    waited_s(table, 11.0, "a", "b")
    assert waited_s(table, 13.0, "unknown") == 0.0
