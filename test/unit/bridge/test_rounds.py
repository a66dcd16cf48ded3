"""Decisions of a round: their effects on requests, and their events."""

import math
from types import SimpleNamespace

import pytest

from sglang_live.bridge.batch_work import BatchWork
from sglang_live.bridge.round_facts import Pool, RoundStamp
from sglang_live.bridge.rounds import Rounds
from sglang_live.messages import HeardOfMany
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.policies import Policies
from sglang_live.policy.view import FRAME_S, StageRates

POOL = Pool(free=5000, total=10_000, free_rows=8)


class Engine:
    """Rounds of 20 ms, with requests that are admitted at once."""

    def __init__(self, *policies: str, config: PolicyConfig | None = None):
        self.rounds = Rounds(RoundPolicy.of(Policies.parse(policies), config))
        self.now_s = 100.0
        self.batch: list = []

    def add(self, rid: str, managed: bool = True) -> None:
        table = self.rounds.table
        table.wait(rid, now_s=self.now_s, managed=managed, prompt_tokens=40, prefill_tokens=40)
        table.admit(rid, self.now_s)
        self.batch = [*self.batch, SimpleNamespace(rid=rid)]

    def run(self, n_rounds: int, heard_s: float | None = None) -> None:
        for _ in range(n_rounds):
            self.now_s += 0.02
            self.rounds.stamp(RoundStamp(self.now_s))
            if heard_s is not None:
                rids = [req.rid for req in self.batch]
                n = len(rids)
                self.rounds.progress(HeardOfMany.of(rids, [heard_s] * n, [False] * n))
            self.rounds.decide(POOL, prefill_running=False)
            for req in list(self.batch):
                if self.rounds.pause(req.rid) and not self.rounds.table.is_paused(req.rid):
                    self.rounds.paused(req.rid)
                elif not self.rounds.pause(req.rid):
                    self.rounds.resumed(req.rid)
            self.rounds.launch_decode([req for req in self.batch if not self.rounds.pause(req.rid)])

    def notes(self) -> list[tuple[str, str]]:
        notes = self.rounds.take_events()
        return [] if notes is None else list(zip(notes.rids, notes.what, strict=True))


def test_a_request_has_events_when_its_class_changes_and_when_it_pauses():
    engine = Engine("urgency", "pacing")
    engine.add("a")
    engine.run(3)
    assert engine.notes() == [("a", "u1")]
    engine.run(2, heard_s=0.0)
    assert engine.notes() == [("a", "u0")]
    engine.run(40, heard_s=0.0)
    assert engine.notes() == [("a", "u2"), ("a", "paused")]
    engine.run(1, heard_s=100.0)
    assert engine.notes() == [("a", "u0"), ("a", "resumed")]
    assert engine.notes() == []


def test_a_request_of_sglangs_own_api_has_no_events():
    engine = Engine("urgency", "pacing")
    engine.add("plain", managed=False)
    engine.run(60)
    assert engine.notes() == []
    assert engine.rounds.report()["u2_s"] == 0.0


def test_residence_is_the_time_that_requests_spent_in_each_class():
    engine = Engine("urgency")
    engine.add("a")
    engine.add("b")
    engine.run(11)
    report = engine.rounds.report()
    assert report["u1_s"] == pytest.approx(2 * 10 * 0.02)
    assert report["rounds"] == 11


def rounds_until_paused(config: PolicyConfig) -> int:
    engine = Engine("urgency", "pacing", config=config)
    engine.add("a")
    for n in range(2000):
        engine.run(1, heard_s=0.0)
        if engine.rounds.table.is_paused("a"):
            return n
    raise AssertionError("never paused")


def test_a_stream_of_short_steps_needs_more_of_them_before_it_pauses():
    n = rounds_until_paused(PolicyConfig())
    shorter = PolicyConfig().changed(
        {"stage.step_s": PolicyConfig().stage.step_s / 2, "stage.chunk_steps": 8}
    )
    assert rounds_until_paused(shorter) >= 2 * n


def test_every_rank_decides_by_the_rates_of_the_stamp():
    engine = Engine("pacing")
    engine.add("a")
    engine.rounds.stamp(RoundStamp(engine.now_s, rates=StageRates(round_s=0.5, busy=0.7)))
    assert engine.rounds.rates.round_s == 0.5
    assert engine.rounds.report()["busy"] == 0.7


def test_a_prefill_lasts_until_its_result_arrives():
    rounds = Engine("urgency").rounds
    assert rounds.launch_prefill(BatchWork(0, n_tokens=100, n_pairs=5050)).number == 1
    rounds.stamp(RoundStamp(101.0))
    assert rounds.last_prefill_s == 101.0  # it is computed
    assert rounds.launch_decode([]).number == 2
    rounds.stamp(RoundStamp(102.0, n_done=1, prefill_done_s=101.5))
    assert rounds.last_prefill_s == 101.5
    rounds.stamp(RoundStamp(103.0, n_done=2, prefill_done_s=101.5))
    assert rounds.last_prefill_s == 101.5


def test_requests_that_came_after_a_decision_are_tried_last_and_none_is_lost():
    engine = Engine("urgency")
    table = engine.rounds.table
    for n, rid in enumerate(("old", "older")):
        table.wait(rid, now_s=99.0 - n, managed=True, prompt_tokens=5, prefill_tokens=5)
    engine.run(1)
    table.wait("new", now_s=engine.now_s, managed=True, prompt_tokens=5, prefill_tokens=5)
    queue = [SimpleNamespace(rid=rid) for rid in ("new", "old", "older")]
    tried, later = engine.rounds.admission_order(queue)
    assert [req.rid for req in tried] == ["older", "old", "new"]
    assert later == []


def test_nothing_is_decided_without_requests():
    engine = Engine("urgency")
    engine.run(2)
    assert engine.rounds.report()["rounds"] == 0
    assert engine.rounds.wait_limit_s() == float("inf")
    assert engine.rounds.prefill_budget() is None


def test_a_decision_is_reused_while_no_fact_changes_for_a_short_time():
    engine = Engine("urgency", "pacing")
    engine.add("a")
    engine.run(1)
    first = engine.rounds.decide(POOL, prefill_running=False)
    assert engine.rounds.decide(POOL, prefill_running=False) is first
    engine.add("b")
    second = engine.rounds.decide(POOL, prefill_running=False)
    assert second is not first
    engine.run(1)
    assert engine.rounds.decide(POOL, prefill_running=False) is not second


def test_unknown_requests_all_stay_in_the_queue():
    engine = Engine("urgency")
    engine.add("a")
    engine.run(1)
    queue = [SimpleNamespace(rid=rid) for rid in ("x", "y", "z")]
    tried, later = engine.rounds.admission_order(queue)
    assert [req.rid for req in tried + later] == ["x", "y", "z"]


def test_earlier_stages_are_told_when_the_first_listener_hears_a_gap():
    engine = Engine("urgency")
    assert engine.rounds.gap_at_s == float("inf")
    engine.add("speak-a")
    engine.run(20, heard_s=0.0)
    until_gap_s = engine.rounds.last.until_gap_s
    assert 0.0 < until_gap_s < 20 * FRAME_S
    assert engine.rounds.gap_at_s == pytest.approx(engine.now_s + until_gap_s)


def test_the_least_slack_is_that_of_the_request_whose_buffer_ends_first():
    engine = Engine("urgency")
    for rid in ("long", "short"):
        engine.add(rid)
    engine.run(100, heard_s=0.0)
    engine.rounds.progress(HeardOfMany.of(["short"], [0.3], [False]))
    slack_s = engine.rounds.slack_of
    assert 0.0 < slack_s(["short"]) < slack_s(["long"])
    assert slack_s(["long", "short"]) == slack_s(["short"])
    engine.add("written", managed=False)
    assert slack_s(["long", "written"]) == slack_s(["unknown"]) == 0.0
    assert slack_s([]) == math.inf
