"""Orders to single requests, which may come before these."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest

from sglang_live.bridge.rounds import rounds_of
from sglang_live.bridge.scheduler.reporting import ReportingScheduler
from sglang_live.engine_channel.messages import TURN_PREFILL_PREFIX, Promote
from sglang_live.policy.config import THINKER
from sglang_live.policy.policies import Policies

RID = f"{TURN_PREFILL_PREFIX}job-1"


@pytest.fixture
def scheduler() -> ReportingScheduler:
    one = ReportingScheduler.__new__(ReportingScheduler)
    one._early_orders = OrderedDict()
    one.rounds = rounds_of(Policies.parse(("urgency", "pacing")), THINKER, 512)
    return one


def queue(scheduler: ReportingScheduler) -> None:
    is_promoted = scheduler._follow_early_order(SimpleNamespace(rid=RID))
    scheduler.rounds.table.wait(
        RID,
        now_s=1.0,
        managed=is_promoted,
        background=not is_promoted,
        prompt_tokens=9,
        prefill_tokens=9,
    )


def test_a_request_is_managed_from_its_promotion_on(scheduler):
    queue(scheduler)
    assert not scheduler.rounds.table.is_managed(RID)
    scheduler._on_promote(Promote(RID))
    assert scheduler.rounds.table.is_managed(RID)


def test_a_promotion_that_comes_before_its_request_counts_once(scheduler):
    scheduler._on_promote(Promote(RID))
    queue(scheduler)
    assert scheduler.rounds.table.is_managed(RID)
    assert not scheduler._follow_early_order(SimpleNamespace(rid=RID))
