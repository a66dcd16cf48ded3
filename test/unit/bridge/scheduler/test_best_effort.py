"""Claims about best-effort requests in the scheduler; what they hold needs an engine to move."""

import math
from types import SimpleNamespace

import pytest

from sglang_live.bridge.round_facts import Pool, RoundStamp
from sglang_live.bridge.rounds import rounds_of
from sglang_live.bridge.scheduler.best_effort import BestEffort, class_of
from sglang_live.policy.config import THINKER
from sglang_live.policy.policies import Policies
from test.unit.bridge.scheduler.fake_scheduler import FakeScheduler


def request(rid: str, ids: list[int] = (), **other) -> SimpleNamespace:
    facts = {"multimodal_inputs": None, "session": None, "to_finish": None, **other}
    return SimpleNamespace(
        rid=rid, origin_input_ids=list(ids), kv=SimpleNamespace(kv_committed_len=40), **facts
    )


@pytest.mark.parametrize(
    ("rid", "deadline_s"),
    [("batch-by1764201600-7", 1764201600.0), ("batch-17642016", math.inf), ("flex-a", math.inf)],
)
def test_the_expiry_of_a_batch_is_in_the_id(rid, deadline_s):
    assert class_of(request(rid)).deadline_s == deadline_s


@pytest.mark.parametrize("rid", ["speak-1", "think-1", "text-1", "some-batch-1"])
def test_other_requests_have_no_class(rid):
    assert class_of(request(rid)) is None


def test_prompts_that_begin_alike_have_the_same_prefix():
    first = list(range(64))
    assert class_of(request("batch-1", [*first, 5])).prefix == (
        class_of(request("batch-2", [*first, 6, 7])).prefix
    )
    assert class_of(request("batch-1", first)).prefix != (
        class_of(request("batch-2", [1, *first])).prefix
    )


class World:
    """A queue, a batch, and places in it; a retracted request joins the queue."""

    def __init__(self, n_places: int, **half):
        self.rounds = rounds_of(Policies.parse(("urgency", "hybrid")), THINKER, None)
        self.rounds.stamp(RoundStamp(100.0))
        self.batch = SimpleNamespace(reqs=[], batch_is_full=True)
        self.half = [request(rid, **facts) for rid, facts in half.items()]
        self.n_places, self.fits_without_best_effort = n_places, True
        self.free, self.idle = 500, 0
        self.scheduler = FakeScheduler(partial_prefills=lambda: list(self.half))
        self.waiting_queue = self.scheduler.waiting_queue
        self.best_effort = BestEffort(self.scheduler, self.rounds, into_tree=True)
        self.scheduler.memory = SimpleNamespace(
            state=self._pool,
            has_place=lambda req, batch: len(batch.reqs) < self.n_places,
            fits=lambda req, running, free: self.fits_without_best_effort,
            retract_one=self._retract_one,
            requeue=self._requeue,
        )

    def add(self, rid: str, *, waiting: bool) -> None:
        req = request(rid)
        self.rounds.table.wait(
            rid,
            now_s=100.0,
            managed=not class_of(req),
            prompt_tokens=40,
            prefill_tokens=40,
            best_effort=class_of(req),
        )
        if waiting:
            self.waiting_queue.append(req)
        else:
            self.rounds.table.admit(rid, 100.0)
            self.batch.reqs.append(req)

    def decide(self) -> None:
        half = [req.rid for req in self.half if self.best_effort.may_requeue(req)]
        self.rounds.decide(
            Pool(free=500, total=1000, free_rows=8), prefill_running=False, half=half
        )

    def _pool(self) -> Pool:
        # What leaves the batch becomes evictable.
        free = self.free + 40 * len(self.waiting_queue)
        return Pool(free=free, total=1000, free_rows=8, idle=self.idle)

    def _retract_one(self, rid: str, running_batch) -> bool:
        [req] = [req for req in running_batch.reqs if req.rid == rid]
        running_batch.reqs.remove(req)
        self.waiting_queue.append(req)
        return True

    def _requeue(self, req, n_running: int) -> None:
        self.half.remove(req)
        self.waiting_queue.append(req)


@pytest.mark.parametrize(("idle", "n_retracted"), [(0, 0), (450, 0), (497, 1), (537, 2), (900, 3)])
def test_decodes_of_best_effort_do_not_evict_idle_sessions_but_for_one(idle, n_retracted):
    world = World(n_places=4)
    for n in range(4):
        world.add(f"batch-{n}", waiting=False)
    world.decide()
    world.idle = idle
    world.best_effort.before_retraction(world.batch)
    assert len(world.waiting_queue) == n_retracted
    assert len(world.batch.reqs) == 4 - n_retracted


def test_best_effort_makes_way_until_another_request_has_a_place():
    world = World(n_places=3)
    for n in range(4):
        world.add(f"batch-{n}", waiting=False)
    world.add("think-1", waiting=True)
    world.decide()
    world.best_effort.before_prefill(world.batch)
    assert len(world.batch.reqs) == 2
    assert world.waiting_queue[0].rid == "think-1"
    assert len(world.waiting_queue) == 3
    assert not world.batch.batch_is_full


def test_it_does_not_for_a_request_that_would_not_fit_all_the_same():
    world = World(n_places=1)
    world.fits_without_best_effort = False
    world.add("batch-1", waiting=False)
    world.add("think-1", waiting=True)
    world.decide()
    world.best_effort.before_prefill(world.batch)
    assert len(world.batch.reqs) == 1


def test_it_does_not_for_best_effort():
    world = World(n_places=1)
    world.add("batch-1", waiting=False)
    world.add("batch-2", waiting=True)
    world.decide()
    world.best_effort.before_prefill(world.batch)
    assert len(world.batch.reqs) == 1


@pytest.mark.parametrize(
    ("facts", "returns"),
    [({}, True), ({"multimodal_inputs": object()}, False), ({"session": object()}, False)],
)
def test_a_half_prefilled_prompt_of_text_alone_returns_to_the_queue(facts, returns):
    world = World(n_places=9, **{"batch-1": facts})
    world.add("batch-1", waiting=False)
    world.add("think-1", waiting=True)
    world.decide()
    world.best_effort.before_prefill(world.batch)
    assert (world.half == []) == returns


def test_idle_sessions_lose_rows_to_one_best_effort_request_at_most():
    world = World(n_places=9)
    world.add("think-1", waiting=True)
    for n in range(3):
        world.add(f"batch-{n}", waiting=True)
    may = world.best_effort.entitled(world.waiting_queue)
    assert [req.rid for req in may] == ["think-1", "batch-0"]
    world.add("batch-9", waiting=False)
    may = world.best_effort.entitled(world.waiting_queue)
    assert [req.rid for req in may] == ["think-1"]
