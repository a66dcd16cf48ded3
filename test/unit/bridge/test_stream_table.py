"""Facts per request: counts, extrapolation and removal."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_live.bridge.best_effort_facts import BestEffortClass, BestEffortCounts
from sglang_live.bridge.stream_table import SILENT_CONSUMER_S, StreamTable
from sglang_live.messages import HeardOfMany
from sglang_live.policy.view import StageRates, StageView

UNIT_S = 0.08


def table_of(*rids: str, now_s: float = 10.0) -> StreamTable:
    table = StreamTable(UNIT_S, capacity=2)
    for rid in rids:
        table.wait(rid, now_s=now_s, managed=True, prompt_tokens=30, prefill_tokens=20)
        table.admit(rid, now_s)
    return table


def steps(table: StreamTable, n: int, *rids: str) -> None:
    reqs = [SimpleNamespace(rid=rid) for rid in rids]
    for _ in range(n):
        table.step(reqs, 10.0)


def view_of(table: StreamTable, now_s: float = 10.0) -> StageView:
    return table.view(
        now_s=now_s,
        occupancy=0.5,
        free_tokens=100,
        free_rows=4,
        prefill_running=False,
        rates=StageRates(),
    )


def test_a_requests_buffer_is_produced_minus_heard_speech():
    table = table_of("a", "b", "c")
    steps(table, 10, "a", "c")
    table.progress(HeardOfMany.of(["a"], [0.5], [False]), 10.0)
    view = view_of(table)
    assert view.buffered_s.tolist() == pytest.approx([0.3, 0.0, 0.8])
    assert view.started.tolist() == [True, False, False]
    assert view.kv_tokens.tolist() == [40, 30, 40]


def test_an_advancing_consumer_takes_a_second_per_second_and_at_most_what_exists():
    table = table_of("a")
    steps(table, 25, "a")
    table.progress(HeardOfMany.of(["a"], [0.5], [True]), 10.0)
    assert view_of(table, 11.0).buffered_s[0] == pytest.approx(0.5)
    assert view_of(table, 13.0).buffered_s[0] == 0.0


def test_fast_speech_is_heard_sooner():
    table = table_of("a", "b")
    steps(table, 25, "a", "b")
    table.progress(HeardOfMany.of(["a", "b"], [0.5, 0.5], [True, False], [1.5, 0.5]), 10.0)
    assert view_of(table, 10.0).buffered_s.tolist() == pytest.approx([1.0, 3.0])
    assert view_of(table, 10.4).buffered_s.tolist() == pytest.approx([0.6, 3.0])


def test_the_newest_progress_wins():
    table = table_of("a")
    steps(table, 25, "a")
    table.progress(HeardOfMany.of(["a", "a"], [1.0, 0.4], [True, False]), 10.0)
    assert view_of(table, 12.0).buffered_s[0] == pytest.approx(1.6)


def test_a_consumer_that_takes_all_that_will_be_made_has_no_buffer():
    table = table_of("a")
    steps(table, 25, "a")
    table.progress(HeardOfMany.of(["a"], [math.inf], [True]), 10.0)
    assert view_of(table, 12.0).buffered_s.tolist() == [0.0]


def test_progress_of_a_request_that_is_gone_changes_nothing():
    table = table_of("a")
    table.remove("a")
    table.progress(HeardOfMany.of(["a"], [1.0], [True]), 10.0)
    assert len(table) == 0


def test_a_buffer_without_progress_becomes_unknown():
    table = table_of("a")
    steps(table, int(SILENT_CONSUMER_S / UNIT_S) - 1, "a")
    assert not math.isnan(view_of(table).buffered_s[0])
    steps(table, 3, "a")
    view = view_of(table)
    assert math.isnan(view.buffered_s[0])
    assert view.started[0]


def test_a_free_slot_has_the_values_of_a_request_that_needs_nothing():
    table = table_of("a", "b")
    table.remove("a")
    view = view_of(table)
    assert not view.waiting[0]
    assert not view.managed[0]
    assert view.started[0]
    assert view.buffered_s[0] == math.inf
    assert view.kv_tokens[0] == 0


def test_a_reused_slot_has_no_values_of_the_request_before():
    table = table_of("a")
    steps(table, 9, "a")
    table.progress(HeardOfMany.of(["a"], [0.1], [True]), 10.0)
    table.remove("a")
    table.wait("b", now_s=12.0, managed=True, prompt_tokens=5, prefill_tokens=5)
    view = view_of(table, 12.0)
    assert len(view) == 1
    assert view.waiting[0]
    assert not view.started[0]
    assert (view.buffered_s[0], view.arrived_s[0]) == (0.0, 12.0)


def test_a_response_waits_for_what_comes_to_the_foreground():
    table = StreamTable(UNIT_S)
    facts = {"now_s": 1.0, "prompt_tokens": 5, "prefill_tokens": 5}
    table.wait("prefill-a", managed=False, background=True, **facts)
    table.wait("text-b", managed=False, **facts)
    for rid in ("prefill-a", "text-b", "unknown"):
        assert not table.is_managed(rid)
        table.to_foreground(rid)
    assert table.is_managed("prefill-a") and not table.is_managed("text-b")


def test_a_retracted_request_keeps_its_produced_speech():
    table = table_of("a")
    steps(table, 9, "a")
    table.pause("a", 11.0)
    table.wait("a", now_s=12.0, managed=True, prompt_tokens=30, prefill_tokens=39)
    view = view_of(table, 12.0)
    assert view.waiting[0]
    assert not view.paused[0]
    assert view.buffered_s[0] == pytest.approx(0.72)
    assert view.arrived_s[0] == 10.0


def test_steps_count_for_the_present_batch_when_requests_come_and_go():
    table = table_of("a", "b")
    batch = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
    table.step(batch, 10.0)
    table.remove("a")
    table.wait("c", now_s=10.0, managed=True, prompt_tokens=1, prefill_tokens=1)
    table.step(batch, 10.0)  # a's last step was launched before it was known to have ended
    ahead = view_of(table).buffered_s
    assert ahead[table.slot("b")] == pytest.approx(0.16)
    assert ahead[table.slot("c")] == 0.0


def test_the_table_grows_with_its_requests():
    table = table_of(*(f"r{i}" for i in range(300)))
    steps(table, 2, *(f"r{i}" for i in range(0, 300, 2)))
    ahead = view_of(table).buffered_s
    assert np.allclose(ahead[::2], 0.16)
    assert np.allclose(ahead[1::2], 0.0)


def test_blocked_requests_are_marked():
    table = table_of("a", "b")
    view = table.view(
        now_s=10.0,
        occupancy=0.0,
        free_tokens=1,
        free_rows=1,
        prefill_running=False,
        rates=StageRates(),
        blocked=["b", "gone"],
    )
    assert view.blocked.tolist() == [False, True]
    assert view_of(table).blocked is None


def best_effort_table() -> StreamTable:
    table = table_of("speak-1")
    for rid, prefix in (("batch-1", 7), ("batch-2", 8), ("batch-3", 7)):
        table.wait(
            rid,
            now_s=10.0,
            managed=False,
            prompt_tokens=30,
            prefill_tokens=20,
            best_effort=BestEffortClass(math.inf, prefix),
        )
    return table


def test_a_step_counts_its_best_effort_requests():
    table = best_effort_table()
    table.admit("batch-1", 10.0)
    reqs = [SimpleNamespace(rid=rid) for rid in ("speak-1", "batch-1")]
    assert table.step(reqs, 10.0) == 1
    assert table.step(reqs, 10.0) == 1
    assert table.step(reqs[:1], 10.0) == 0


def test_best_effort_requests_are_counted_with_the_kv_that_they_hold():
    table = best_effort_table()
    for rid in ("batch-1", "batch-2"):
        table.admit(rid, 10.0)
    steps(table, 5, "speak-1", "batch-1")
    table.pause("batch-2", 10.0)
    assert table.best_effort_counts() == BestEffortCounts(1, 1, 1, 65)
    for rid in ("batch-1", "batch-2", "batch-3"):
        table.remove(rid)
    assert table.best_effort_counts() == BestEffortCounts(0, 0, 0, 0)
    assert table.best_effort(()) is None and not table.has_best_effort


def test_a_prefix_that_best_effort_requests_share_is_counted_once():
    table = StreamTable(0.08)
    first = np.arange(30)
    prompts = (first, np.append(first[:20], [70, 71]), np.append(first[:25], 80), first + 100)
    for n, prompt in enumerate(prompts):
        own = BestEffortClass(math.inf, int(prompt[0]), prompt.astype(np.int64).tobytes())
        table.wait(
            f"batch-{n}",
            now_s=1.0,
            managed=False,
            prompt_tokens=len(prompt),
            prefill_tokens=len(prompt),
            best_effort=own,
        )
    held = 0
    for n, more in enumerate((30, 2, 1, 30)):
        table.admit(f"batch-{n}", 2.0)
        held += more
        assert table.best_effort_counts().kv_tokens == held
    table.remove("batch-0")
    # The prefix stays for those that are left.
    assert table.best_effort_counts().kv_tokens == 25 + 2 + 1 + 30


def test_requests_whose_prompts_begin_alike_are_a_group_by_the_arrival_of_the_first():
    table = best_effort_table()
    groups = table.best_effort(("batch-2",)).group
    one, two, three = (table.slot(f"batch-{n}") for n in (1, 2, 3))
    assert groups[one] == groups[three] < groups[two]
    assert table.best_effort(("batch-2",)).half.nonzero()[0].tolist() == [two]
    # A group that has ended begins anew, behind the others.
    for rid in ("batch-1", "batch-3"):
        table.remove(rid)
    new = BestEffortClass(math.inf, 7)
    table.wait(
        "batch-4", now_s=11.0, managed=False, prompt_tokens=3, prefill_tokens=3, best_effort=new
    )
    groups = table.best_effort(()).group
    assert groups[table.slot("batch-4")] > groups[two]


def test_a_retracted_best_effort_request_keeps_its_class():
    table = best_effort_table()
    table.admit("batch-1", 10.0)
    table.wait("batch-1", now_s=11.0, managed=False, prompt_tokens=30, prefill_tokens=30)
    assert table.is_best_effort("batch-1")
    table.remove("batch-1")
    assert not table.is_best_effort("batch-1")
