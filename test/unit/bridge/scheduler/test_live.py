"""The prompts of a round's prefill, and its wait; the rest of the scheduler needs an engine."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.scheduler import Scheduler

from sglang_live.bridge.rounds import IDLE_WAIT_S
from sglang_live.bridge.scheduler.channel import Channel, SilentChannel
from sglang_live.bridge.scheduler.live import audio_within
from sglang_live.bridge.scheduler.part import Part
from test.unit.bridge.scheduler.fake_scheduler import FakeScheduler

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


def test_the_rank_that_receives_input_alone_waits_for_it():
    """Another rank that slept would delay rank 0's input by as much."""
    waits: list[int] = []
    first, other = Channel(FakeScheduler()), SilentChannel(FakeScheduler())
    first._poller = other._poller = SimpleNamespace(poll=waits.append)
    for channel in (first, other):
        channel.wait(0.02)
    assert waits == [20]


class FakePart(Part):
    """Limits of waits, and whether something waits for input."""

    limit_s = float("inf")
    awaits = False

    def wait_limit_s(self) -> float:
        return self.limit_s

    def idle_limit_s(self) -> float:
        return self.limit_s

    def awaits_input(self) -> bool:
        return self.awaits


class World:
    """A scheduler without a batch to run; `waits` in milliseconds, "upstream" for its own."""

    def __init__(self, monkeypatch):
        self.waits: list[float | str] = []
        self.part = FakePart(FakeScheduler())
        self.batch = SimpleNamespace(is_empty=lambda: True, reqs=[])
        self.scheduler = FakeScheduler(
            running_batch=self.batch, maybe_send_health_check_signal=lambda: None
        )
        self.scheduler.channel.wait = lambda limit_s: self.waits.append(round(1000 * limit_s))
        self.scheduler.channel.report = lambda totals, at_once=False: None
        self.scheduler.compose(self.part)
        # What the loop does around the waits is SGLang's.
        monkeypatch.setattr(self.scheduler.memory, "before_round", lambda: None)
        plan = SimpleNamespace(batch_to_run=None, running_batch=self.batch)
        monkeypatch.setattr(Scheduler, "get_next_batch_to_run", lambda *args: plan)
        monkeypatch.setattr(Scheduler, "on_idle", lambda rank: self.waits.append("upstream"))
        monkeypatch.setattr(Scheduler, "is_fully_idle", lambda *args: False)

    def round(self) -> None:
        self.scheduler.get_next_batch_to_run(self.batch, None)


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


def test_an_engine_whose_only_prefill_is_deferred_sleeps_until_it_is_due(world):
    world.round()
    assert world.waits == []
    world.part.awaits = True
    world.round()
    assert world.waits == [1000 * IDLE_WAIT_S]


def test_a_round_in_which_kv_is_loaded_ahead_is_not_late(world):
    world.part.awaits = True
    for world.part.limit_s in (1.0, 0.005):
        world.round()
    assert world.waits == [1000 * IDLE_WAIT_S, 5]


def test_an_idle_engine_sleeps_until_a_preload_is_judged(world):
    for world.part.limit_s in (0.05, 0.0, float("inf")):
        world.scheduler.on_idle()
    assert world.waits == [50, 0, "upstream"]


def test_what_is_urgent_counts_for_the_requests_that_come_in_the_same_round(monkeypatch):
    """SGLang puts requests in front of what rank 0 adds to a round."""
    handled: list[list] = []
    monkeypatch.setattr(
        Scheduler, "process_input_requests", lambda rank, reqs: handled.append(reqs)
    )
    scheduler = FakeScheduler(_urgent=(bytes,))
    scheduler.process_input_requests(["a", "b", b"order"])
    scheduler.process_input_requests(["a", "b"])
    assert handled == [[b"order", "a", "b"], ["a", "b"]]
