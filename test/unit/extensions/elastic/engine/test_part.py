"""Limits, needs and refusals of a scheduler whose pool changes its size, without an engine."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from sglang_live.bridge.cache.radix import LiveRadixCache
from sglang_live.bridge.scheduler.best_effort import BestEffort
from sglang_live.extensions.elastic.engine.elastic_memory import Geometry
from sglang_live.extensions.elastic.engine.part import Elastic, ElasticRound
from test.unit.bridge.scheduler import fake_scheduler

GEOMETRY = Geometry((128,) * 8, 1, 4096)  # 32 rows in 8 granules
NOW_S = 50.0


@dataclass(frozen=True)
class FakeObserver:
    """SGLang's observers are frozen."""

    max_total_num_tokens: int = 0


class FakeReq:
    def __init__(self, rid: str, n_prompt: int, most_new: int, n_output: int = 0):
        self.rid, self.origin_input_ids, self.output_ids = rid, [0] * n_prompt, [0] * n_output
        self.sampling_params = SimpleNamespace(max_new_tokens=most_new)


class FakeElastic:
    """ElasticOrders, with a pool of some units; its capacity changes with the next step."""

    def __init__(self, units: int, obtainable_units: int = 0, limit_units: int = 512):
        self.obtainable = obtainable_units * GEOMETRY.granules
        self.pool = SimpleNamespace(
            capacity_tokens=GEOMETRY.tokens(units),
            memory=SimpleNamespace(
                geometry=GEOMETRY, limit_granules=limit_units * GEOMETRY.granules
            ),
        )
        self.totals = {"elastic_refused_too_long": 0.0}
        self.needs: list[tuple[int, int, int]] = []
        self.grows_to: int | None = None

    def step(self, now_s, evict) -> bool:
        if self.grows_to is None:
            return False
        self.pool.capacity_tokens, self.grows_to = GEOMETRY.tokens(self.grows_to), None
        return True

    def report_need(self, needed: int, reserved: int, idle: int) -> None:
        self.needs.append((needed, reserved, idle))


class FakeScheduler(fake_scheduler.FakeScheduler):
    """A scheduler with an elastic part, and perhaps others."""

    def __init__(self, orders: FakeElastic, waiting=(), running=(), free=0, idle=0):
        session = SimpleNamespace(idle=SimpleNamespace(tokens=idle))
        super().__init__(
            waiting_queue=list(waiting),
            max_total_num_tokens=orders.pool.capacity_tokens,
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: free),
            tree_cache=SimpleNamespace(evictable_size=lambda: idle, session=session),
            new_token_ratio_tracker=SimpleNamespace(current=0.5),
            model_config=SimpleNamespace(context_len=10_000),
            beam_coordinator=SimpleNamespace(max_req_len=0),
            pool_stats_observer=FakeObserver(),
            invariant_checker=FakeObserver(),
            load_inquirer=FakeObserver(),
            kv_events_publisher=FakeObserver(),
        )
        self._running = set(running)
        self.released: list[str] = []
        self.told: list[dict] = []
        self.memory.tokens_to_hold = lambda req: len(req.origin_input_ids)
        self.elastic = object.__new__(Elastic)  # without a mover to greet
        self.elastic._scheduler = self
        self.elastic._orders, self.elastic._pool = orders, orders.pool
        self.elastic._next_need_s, self.elastic._too_long_since_s = 0.0, {}
        self.parts = (*self.parts, self.elastic)

    def collect_inflight_reqs(self):
        return self._running

    def _release_aborted_request(self, req) -> None:
        self.released.append(req.rid)

    def send_abort_output(self, abort_req, req) -> None:
        self.told.append(abort_req.finished_reason)


@pytest.fixture(autouse=True)
def no_weight_versions(monkeypatch):
    def abort(req, finished_reason):
        return SimpleNamespace(rid=req.rid, finished_reason=finished_reason)

    monkeypatch.setattr("sglang_live.extensions.elastic.engine.part._make_abort_req", abort)


def test_every_count_and_limit_follows_the_size():
    scheduler = FakeScheduler(elastic := FakeElastic(units=32), free=1023)
    elastic.grows_to = 100
    scheduler.elastic._on_elastic_round(ElasticRound(NOW_S))
    n_tokens = GEOMETRY.tokens(100)
    assert scheduler.max_total_num_tokens == n_tokens
    for name in ("pool_stats_observer", "invariant_checker", "load_inquirer"):
        assert getattr(scheduler, name).max_total_num_tokens == n_tokens
    assert scheduler.max_req_len == scheduler.beam_coordinator.max_req_len == n_tokens - 1
    assert scheduler.max_req_input_len == n_tokens - 6


@pytest.mark.parametrize(
    ("obtainable", "limit", "tokens"),
    [(0, 512, 1023), (100, 512, 1023 + 3200), (100, 64, 64 * 32 - 1), (500, 512, 10_000)],
)
def test_a_request_may_be_as_long_as_what_could_be_received(obtainable, limit, tokens):
    """Up to the address space, and up to the model's context."""
    scheduler = FakeScheduler(FakeElastic(32, obtainable, limit), free=1023)
    scheduler.elastic._follow_size()
    assert scheduler.max_req_len == tokens - 1
    assert scheduler.max_total_num_tokens == 1023


def test_running_requests_need_what_they_hold_and_write_soon():
    running = [FakeReq("a", 10, 100, n_output=90), FakeReq("b", 10, 9000)]
    scheduler = FakeScheduler(FakeElastic(32), running=running, free=600, idle=123)
    locked = 1023 - 600 - 123
    # 4,096 is what SGLang counts of a request's output at most.
    assert scheduler.elastic._tokens_needed() == (locked + 10 + 64, locked + (10 + 4096) // 2, 123)


def test_waiting_requests_need_their_prompt_and_output_beside_all_that_may_be_written():
    scheduler = FakeScheduler(
        FakeElastic(32),
        waiting=[FakeReq("w", 5000, 8)],
        running=[FakeReq("r", 10, 500)],
        free=1023,
    )
    needed, reserved, idle = scheduler.elastic._tokens_needed()
    assert needed == reserved == 5000 + 8 + 2 + 250
    assert idle == 0


def test_the_pool_grows_for_one_waiting_best_effort_request_at_a_time():
    waiting = [FakeReq("batch-1", 5000, 8), FakeReq("w", 300, 8), FakeReq("batch-2", 900, 8)]
    scheduler = FakeScheduler(FakeElastic(32), waiting=waiting, free=1023)
    counts = SimpleNamespace(running=0, paused=0)
    table = SimpleNamespace(
        is_best_effort=lambda rid: rid.startswith("batch"), best_effort_counts=lambda: counts
    )
    rounds = SimpleNamespace(table=table)
    scheduler.parts = (*scheduler.parts, BestEffort(scheduler, rounds, into_tree=True))
    assert scheduler.elastic._tokens_needed()[0] == (300 + 8 + 2) + (5000 + 8 + 2)
    counts.running = 1
    assert scheduler.elastic._tokens_needed()[0] == 300 + 8 + 2


class FakeTree(LiveRadixCache):
    def __init__(self):
        self.evicted: list[tuple[str, int]] = []

    def evict_tree(self, n_tokens):
        self.evicted.append(("tree", n_tokens))
        return n_tokens

    def evict(self, params):
        self.evicted.append(("all", params.num_tokens))
        return SimpleNamespace(num_tokens_evicted=params.num_tokens)


def test_idle_sessions_are_evicted_only_for_requests_that_wait():
    scheduler = FakeScheduler(FakeElastic(32))
    scheduler.tree_cache = tree = FakeTree()
    assert scheduler.elastic._evict_for_move(50, with_sessions=False) == 50
    assert scheduler.elastic._evict_for_move(70, with_sessions=True) == 70
    assert tree.evicted == [("tree", 50), ("all", 70)]


def test_a_waiting_request_is_shortened_to_what_can_be_had():
    waiting = [FakeReq("long-output", 500, 4000), FakeReq("retracted", 500, 4000, n_output=100)]
    scheduler = FakeScheduler(FakeElastic(32), waiting=waiting, free=1023)
    scheduler.elastic._fit_waiting(NOW_S)
    assert waiting[0].sampling_params.max_new_tokens == 1023 - 500 - 3
    assert waiting[1].sampling_params.max_new_tokens == 1023 - 500 - 3
    assert scheduler.waiting_queue == waiting


def test_a_waiting_request_is_refused_only_when_the_memory_stays_away():
    fits, too_long = FakeReq("fits", 100, 10), FakeReq("fits-10", 3000, 10)
    elastic = FakeElastic(32, obtainable_units=0)
    scheduler = FakeScheduler(elastic, waiting=[fits, too_long], free=1023)
    scheduler.elastic._fit_waiting(NOW_S)
    scheduler.elastic._fit_waiting(NOW_S + 1.0)
    assert scheduler.waiting_queue == [fits, too_long]
    elastic.obtainable = 100 * GEOMETRY.granules  # it could be received again
    scheduler.elastic._fit_waiting(NOW_S + 1.5)
    elastic.obtainable = 0
    scheduler.elastic._fit_waiting(NOW_S + 3.0)
    assert scheduler.waiting_queue == [fits, too_long]
    scheduler.elastic._fit_waiting(NOW_S + 5.5)
    assert scheduler.waiting_queue == [fits]
    assert scheduler.released == ["fits-10"]
    (reason,) = scheduler.told
    assert reason["message"] == "The request has 3000 tokens; the KV pool can hold 1023 now."
    assert elastic.totals["elastic_refused_too_long"] == 1


def test_needs_are_told_at_intervals():
    scheduler = FakeScheduler(elastic := FakeElastic(32), free=1023)
    for at in range(20):
        scheduler.elastic._on_elastic_round(ElasticRound(NOW_S + at / 100))
    assert 3 <= len(elastic.needs) <= 5


def test_the_order_of_a_round_is_handled_before_its_requests():
    assert Elastic.urgent == (ElasticRound,)
