"""Orders to single requests, which may come before these."""

from types import SimpleNamespace

import pytest

from sglang_live.bridge.rounds import rounds_of
from sglang_live.bridge.scheduler.deciding import Deciding
from sglang_live.bridge.scheduler.interrupts import Interrupts
from sglang_live.ids import TURN_PREFILL_PREFIX
from sglang_live.messages import Interrupt, Promote
from sglang_live.policy.config import THINKER
from sglang_live.policy.policies import Policies
from test.unit.bridge.scheduler.fake_scheduler import FakeScheduler

RID = f"{TURN_PREFILL_PREFIX}job-1"


class World:
    """A scheduler's queue, its deciding part and its interrupts."""

    def __init__(self):
        scheduler = FakeScheduler(collect_inflight_reqs=set)
        rounds = rounds_of(Policies.parse(("urgency", "pacing")), THINKER, 512)
        self.deciding = Deciding(scheduler, rounds, kv_by_tokens=True)
        self.interrupts = Interrupts(scheduler)
        scheduler.compose(self.deciding, self.interrupts)
        self.scheduler = scheduler

    def give(self, order: Interrupt | Promote) -> None:
        for part in self.scheduler.parts:
            if handler := part.handlers().get(type(order)):
                handler(order)

    def queue(self) -> SimpleNamespace:
        req = SimpleNamespace(
            rid=RID,
            origin_input_ids=[0] * 9,
            output_ids=[0] * 3,
            session=None,
            multimodal_inputs=None,
            to_finish=None,
            sampling_params=SimpleNamespace(max_new_tokens=100),
        )
        for part in self.scheduler.parts:
            part.queues(req, False)
        return req

    @property
    def is_managed(self) -> bool:
        return self.deciding.rounds.table.is_managed(RID)

    def end(self) -> None:
        self.deciding.rounds.table.remove(RID)


@pytest.fixture
def world() -> World:
    return World()


def test_a_request_is_managed_from_its_promotion_on(world):
    world.queue()
    assert not world.is_managed
    world.give(Promote(RID))
    assert world.is_managed


def test_a_promotion_that_comes_before_its_request_counts_once(world):
    world.give(Promote(RID))
    world.queue()
    assert world.is_managed
    world.end()
    world.queue()
    assert not world.is_managed


def test_an_interrupt_that_comes_before_its_request_ends_it_at_once(world):
    world.give(Interrupt(RID))
    assert world.queue().sampling_params.max_new_tokens == 3
    assert world.queue().sampling_params.max_new_tokens == 100
