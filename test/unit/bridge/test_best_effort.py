"""Claims about best-effort requests over many rounds: none is lost, and none starves.

The table and the decisions are real; the engine is a simulation of its rounds: queue, batch, paused
and half-prefilled requests, in simulated time.
"""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_live.bridge.batch_work import BatchWork
from sglang_live.bridge.best_effort_facts import BestEffortClass
from sglang_live.bridge.round_facts import Pool, RoundStamp
from sglang_live.bridge.rounds import Rounds
from sglang_live.messages import HeardOfMany
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.policies import Policies
from sglang_live.policy.round_cost import RoundCost

COST = RoundCost(
    decode=(5e-3, 1e-3, 0.0),
    prefill=(5e-3, 2e-4, 0.0, 0.0, 0.0, 0.0),
    decode_error=0.1,
    prefill_error=0.1,
)
POOL_TOKENS, CHUNK_TOKENS, STEP_S = 6000, 512, 0.08
# With overlap a decision may be as old as REVIEW_S, and a round as long as a chunk.
SLACK_OF_BOUND_S = 1.0


@dataclass(slots=True, eq=False)
class FakeReq:
    """A request of the simulated engine. heard: it has a listener, who plays what is made."""

    rid: str
    arrives_s: float
    n_prompt: int
    n_steps: int
    heard: bool
    leaves_s: float = math.inf
    computed: int = 0
    produced: int = 0
    began_s: float = math.nan
    moved_s: float = math.nan
    ended: str = ""

    @property
    def kv_tokens(self) -> int:
        return self.computed + self.produced


@dataclass
class FakeEngine:
    """Owner of the simulated requests. Prefill goes first, as in SGLang, one chunk a round."""

    rounds: Rounds
    to_come: list[FakeReq]
    now_s: float = 100.0
    queue: list[FakeReq] = field(default_factory=list)
    running: list[FakeReq] = field(default_factory=list)
    paused: list[FakeReq] = field(default_factory=list)
    half: FakeReq | None = None
    done: list[FakeReq] = field(default_factory=list)
    longest_wait_s: float = 0.0
    n_requeued: int = 0

    @property
    def live(self) -> list[FakeReq]:
        return [*self.queue, *self.holding]

    @property
    def holding(self) -> list[FakeReq]:
        return [*self.running, *self.paused, *([self.half] if self.half else [])]

    def run(self, until_s: float) -> None:
        self.to_come.sort(key=lambda req: req.arrives_s)
        while (self.to_come or self.live) and self.now_s < until_s:
            self.rounds.stamp(RoundStamp(self.now_s, cost=COST))
            self._arrive()
            self._leave()
            self._report()
            half = [self.half.rid] if self.half is not None and not self.half.heard else []
            self.rounds.decide(self._pool(), prefill_running=self._others_half(), half=half)
            if not self._prefill() and not self._decode():
                self.now_s += 0.005

    def _others_half(self) -> bool:
        return self.half is not None and self.half.heard

    def _pool(self) -> Pool:
        free = POOL_TOKENS - sum(req.kv_tokens for req in self.holding)
        return Pool(free=free, total=POOL_TOKENS, free_rows=64 - len(self.holding))

    def _arrive(self) -> None:
        while self.to_come and self.to_come[0].arrives_s <= self.now_s:
            req = self.to_come.pop(0)
            req.moved_s = self.now_s
            self._enqueue(req)

    def _enqueue(self, req: FakeReq) -> None:
        self.queue.append(req)
        self.rounds.table.wait(
            req.rid,
            now_s=self.now_s,
            managed=req.heard,
            prompt_tokens=req.n_prompt,
            prefill_tokens=req.n_prompt - req.computed,
            best_effort=None if req.heard else BestEffortClass(math.inf, 0),
        )

    def _leave(self) -> None:
        for req in [req for req in self.live if req.leaves_s <= self.now_s]:
            self._end(req, "aborted")

    def _end(self, req: FakeReq, how: str) -> None:
        for where in (self.queue, self.running, self.paused):
            if req in where:
                where.remove(req)
        if self.half is req:
            self.half = None
        req.ended = how
        self.rounds.table.remove(req.rid)
        self.done.append(req)

    def _report(self) -> None:
        """Listeners play one second per second from their first step on."""
        heard = [req for req in self.live if req.heard and req.produced]
        played = [min(self.now_s - req.began_s, req.produced * STEP_S) for req in heard]
        if heard:
            n = len(heard)
            news = HeardOfMany.of([r.rid for r in heard], played, [True] * n)
            self.rounds.progress(news)

    def _prefill(self) -> bool:
        budget = self.rounds.prefill_budget()
        if budget == 0:
            return False
        if self.half is not None and self.half.rid in self.rounds.requeue():
            req, self.half = self.half, None
            self.n_requeued += 1
            self._enqueue(req)  # what was computed is found again in the tree
        tried, later = self.rounds.admission_order(self.queue)
        assert sorted(map(id, [*tried, *later])) == sorted(map(id, self.queue))
        req = self.half or next(iter(tried), None)
        if req is None:
            return False
        if self.rounds.admits_others():
            self._make_room(req)
        if self.half is None:
            if req.n_prompt + req.n_steps > self._pool().free + req.computed:
                return False
            self.queue.remove(req)
            self.rounds.table.admit(req.rid, self.now_s)
        n = min(req.n_prompt - req.computed, CHUNK_TOKENS, budget or CHUNK_TOKENS)
        work = BatchWork(0, n_tokens=n, n_context=n * req.computed)
        self.rounds.launch_prefill(work, [req])
        self.now_s += COST.prefill_s(n, req.computed)
        req.computed += n
        self._moved(req)
        self.half = req if req.computed < req.n_prompt else None
        if self.half is None:
            self.running = [*self.running, req]
        return True

    def _make_room(self, first: FakeReq) -> None:
        for rid in self.rounds.retracted_first():
            if first.n_prompt + first.n_steps <= self._pool().free:
                return
            req = next(req for req in self.holding if req.rid == rid)
            self.running = [r for r in self.running if r is not req]
            self.paused = [r for r in self.paused if r is not req]
            self.half = None if self.half is req else self.half
            req.computed = 0  # evicted from the tree
            self._enqueue(req)

    def _decode(self) -> bool:
        for req in list(self.running):
            if self.rounds.pause(req.rid):
                self.running = [r for r in self.running if r is not req]
                self.paused.append(req)
                self.rounds.paused(req.rid)
        for req in list(self.paused):
            if not self.rounds.pause(req.rid):
                self.paused.remove(req)
                self.running = [*self.running, req]
                self.rounds.resumed(req.rid)
        if not self.running:
            return False
        context = sum(req.kv_tokens for req in self.running)
        self.rounds.launch_decode(self.running, context)
        self.now_s += float(COST.decode_s(len(self.running), context))
        for req in list(self.running):
            req.began_s = self.now_s if math.isnan(req.began_s) else req.began_s
            req.produced += 1
            self._moved(req)
            if req.produced == req.n_steps:
                self._end(req, "complete")
        return True

    def _moved(self, req: FakeReq) -> None:
        if not req.heard and req in self.holding:
            self.longest_wait_s = max(self.longest_wait_s, self.now_s - req.moved_s)
        req.moved_s = self.now_s


requests = st.builds(
    FakeReq,
    rid=st.just(""),
    arrives_s=st.floats(100.0, 110.0),
    n_prompt=st.integers(1, 1500),
    n_steps=st.integers(1, 80),
    heard=st.booleans(),
    leaves_s=st.just(math.inf) | st.floats(100.0, 115.0),
)


def engine(policies: tuple[str, ...], reqs: list[FakeReq]) -> FakeEngine:
    for n, req in enumerate(reqs):
        req.rid = f"{'speak' if req.heard else 'batch'}-{n:04d}"
    config = PolicyConfig().changed(
        {"stage.may_pause_prefill": True, "stage.chunk_tokens": CHUNK_TOKENS}
    )
    return FakeEngine(Rounds(RoundPolicy.of(Policies.parse(policies), config)), reqs)


@pytest.mark.parametrize(
    "policies",
    [("urgency", "pacing", "hybrid"), ("fcfs", "hybrid"), ("urgency", "bros"), ("hybrid", "bros")],
    ids="+".join,
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(reqs=st.lists(requests, min_size=1, max_size=24))
def test_every_request_is_complete_or_was_aborted(policies, reqs):
    simulated = engine(policies, reqs)
    n = len(reqs)
    simulated.run(until_s=1000.0)
    assert len(simulated.done) == n
    for req in simulated.done:
        assert req.ended == "aborted" or req.produced == req.n_steps
    assert len(simulated.rounds.table) == 0
    counts = simulated.rounds.table.best_effort_counts()
    assert (counts.running, counts.paused, counts.waiting, counts.kv_tokens) == (0, 0, 0, 0)


def crowd(n_heard: int, apart_s: float, n_prompt: int) -> list[FakeReq]:
    """Listeners who come one after the other, and batches from the beginning."""
    heard = [FakeReq("", 100.0 + apart_s * n, 60, 60, True) for n in range(n_heard)]
    return [*heard, *(FakeReq("", 100.0, n_prompt, 40, False) for _ in range(12))]


@pytest.mark.parametrize("policies", [("urgency", "pacing", "hybrid"), ("urgency", "hybrid")])
def test_best_effort_with_memory_steps_within_the_bound_beside_many_listeners(policies):
    simulated = engine(policies, crowd(n_heard=400, apart_s=0.09, n_prompt=300))
    simulated.run(until_s=600.0)
    config = simulated.rounds.config
    assert 1.0 < simulated.longest_wait_s <= config.pacing.max_pause_s + SLACK_OF_BOUND_S
    assert all(req.ended == "complete" for req in simulated.done)
    assert len(simulated.done) == 412


def test_half_prefilled_best_effort_is_requeued_for_listeners():
    simulated = engine(("urgency", "pacing", "hybrid"), crowd(60, apart_s=0.15, n_prompt=1500))
    simulated.run(until_s=300.0)
    assert simulated.n_requeued > 0
    assert all(req.ended == "complete" for req in simulated.done)
