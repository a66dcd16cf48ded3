"""The prompts of a round's prefill, and its wait; the rest of the scheduler needs an engine."""

from types import SimpleNamespace

import pytest

from sglang_live.bridge.scheduler.live import IDLE_WAIT_MS, LiveScheduler
from sglang_live.bridge.scheduler.sliced_prefill import audio_within
from sglang_live.bridge.tiers.lender_scheduler import LenderScheduler

SPOKEN, WRITTEN = (
    SimpleNamespace(multimodal_inputs=object()),
    SimpleNamespace(multimodal_inputs=None),
)


@pytest.mark.parametrize(
    ("queue", "n_first"),
    [
        ([SPOKEN], 1),
        ([SPOKEN, SPOKEN, SPOKEN], 1),
        ([WRITTEN, SPOKEN, WRITTEN, SPOKEN], 3),
        ([WRITTEN, WRITTEN, WRITTEN], 3),  # upstream slices text itself
        ([], 0),
    ],
)
def test_one_prompt_with_audio_is_admitted_and_others_as_far_as_they_fit(queue, n_first):
    first, rest = audio_within(150, queue, [100] * len(queue))
    assert first + rest == queue and len(first) == n_first
    assert audio_within(100 * len(queue), queue, [100] * len(queue)) == (queue, [])


@pytest.mark.parametrize(("inbox", "n_waits"), [(object(), 1), (None, 0)])
def test_the_rank_that_receives_input_alone_waits_for_it(inbox, n_waits):
    """Another rank that slept would delay rank 0's input by as much."""
    waits: list[int] = []
    rank = LiveScheduler.__new__(LiveScheduler)
    rank.inbox, rank.rounds, rank._poller = inbox, None, SimpleNamespace(poll=waits.append)
    rank._tiers_wait_s = 1.0
    rank._wait_for_input(decodes=False)
    assert len(waits) == n_waits


def test_an_engine_whose_only_prefill_is_deferred_sleeps_until_it_is_due():
    rank, budget = LiveScheduler.__new__(LiveScheduler), [0]
    rank.paused, rank.rounds = {}, SimpleNamespace(prefill_budget=lambda: budget[0])
    assert rank._awaits_input()
    budget[0] = None
    assert not rank._awaits_input()


def test_a_round_in_which_kv_is_loaded_ahead_is_not_late():
    waits: list[int] = []
    rank = LiveScheduler.__new__(LiveScheduler)
    rank.inbox, rank.rounds, rank._poller = object(), None, SimpleNamespace(poll=waits.append)
    for rank._tiers_wait_s in (1.0, 0.005):
        rank._wait_for_input(decodes=False)
    assert waits == [IDLE_WAIT_MS, 5]


def test_an_idle_engine_sleeps_until_a_preload_is_judged(monkeypatch):
    waits: list[int | str] = []
    rank = LiveScheduler.__new__(LiveScheduler)
    rank.inbox, rank._poller = object(), SimpleNamespace(poll=waits.append)
    rank.rounds = rank._progress = None
    rank.running_batch = SimpleNamespace(is_empty=lambda: True)
    monkeypatch.setattr(rank, "is_fully_idle", lambda: False)
    monkeypatch.setattr(rank, "maybe_send_health_check_signal", lambda: None)
    monkeypatch.setattr(LenderScheduler, "on_idle", lambda rank: waits.append("upstream"))
    for rank._tiers_wait_s in (0.05, 0.0, float("inf")):
        rank.on_idle()
    assert waits == [50, 1, "upstream"]
