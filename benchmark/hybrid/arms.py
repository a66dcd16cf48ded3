"""The arms of the comparison: how stock SGLang, the paper and the live policies choose rounds."""

import itertools
import math
from dataclasses import dataclass, field

from benchmark.hybrid.engine import Arm, EngineSize, HybridEngine
from benchmark.hybrid.listeners import TPOT_S, TTFT_S, is_heard
from sglang_live.bridge.round_facts import Pool
from sglang_live.bridge.rounds import Rounds, rounds_of
from sglang_live.extensions.planner.device_model.costs import EngineCosts
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.policy.config import THINKER
from sglang_live.policy.policies import Policies

# PCIe 5.0, as in the device models.
_LINK_BYTES_PER_S = 55.6e9
# Of a prompt: as the policies' own (StageConstants.min_chunk_tokens).
_LEAST_SLICE_TOKENS = 64


class Fcfs:
    """SGLang: as they come. What decodes goes behind all prefills."""

    rounds: Rounds | None = None

    def before_round(self, engine: HybridEngine, now_s: float) -> None:
        """The queue is in its order already."""

    def before_prefill(self, engine: HybridEngine) -> None:
        """Nothing makes way."""

    def after_round(self, engine: HybridEngine) -> None:
        """No request was hidden from the engine."""

    def prefill_tokens(self, engine: HybridEngine) -> int:
        return engine.spec.chunk_tokens

    def must_pause(self, req: Request) -> bool:
        return False

    def retraction_order(self, engine: HybridEngine) -> list[Request]:
        # Fewest outputs first, then the longest prompts: what is lost is cheapest then.
        return sorted(engine.with_kv, key=lambda req: (req.n_out, -req.prompt_tokens))


class Priority(Fcfs):
    """SGLang with --enable-priority-scheduling, --retraction-policy priority, and preemption.

    Heard requests go first in the queue. As in SGLang 0.5.21, running ones are preempted only when
    all request rows are taken (PrefillAdder.preempt_to_schedule), lose their KV, and a prompt that
    is half-prefilled always goes on.
    """

    def before_round(self, engine: HybridEngine, now_s: float) -> None:
        engine.waiting.sort(key=lambda req: (not is_heard(req), req.owner.arrives_s))
        heard = [req for req in engine.waiting if is_heard(req)]
        lacking = len(heard) - engine.pool.free_rows
        for req in self._newest_best_effort(engine)[: max(0, lacking)]:
            engine.retract(req)

    def retraction_order(self, engine: HybridEngine) -> list[Request]:
        order = super().retraction_order(engine)
        return sorted(order, key=is_heard)

    @staticmethod
    def _newest_best_effort(engine: HybridEngine) -> list[Request]:
        found = [req for req in engine.with_kv if not is_heard(req)]
        return sorted(found, key=lambda req: -req.owner.arrives_s)


@dataclass
class Bros(Priority):
    """BROS by the letter: the batch of each round by a cost model and the time that is left.

    A round takes heard requests by their residual time, as long as its predicted duration is within
    the smallest of these that can still be kept, and then best-effort ones up to a number. That
    doubles in a round without an urgent heard request, and is the first again when the prediction
    exceeds the smallest residual time. Best-effort KV is taken from its end for heard requests,
    after a copy to the host (steps 1 to 5 of the paper's summary; the paper predicts with a linear
    model of its own runs, and here that model is exact).

    bounds_prefill: a prefill, too, is no longer than the smallest residual time, less a decode
        round; where that is too short for a useful slice, running requests decode first. The paper
        bounds decode batches only, and prompts here are longer than its own.
    """

    costs: EngineCosts
    bounds_prefill: bool = False
    first: int = 128
    n_best_effort: int = 128
    _prefill_s: float = math.inf
    _left_out: set[str] = field(default_factory=set)
    _hidden: list[Request] = field(default_factory=list)

    def before_round(self, engine: HybridEngine, now_s: float) -> None:
        waiting = engine.waiting
        waiting.sort(key=lambda req: (not is_heard(req), req.owner.arrives_s))
        running = [req for req in engine.with_kv if is_heard(req)]
        left_s = {req.rid: self._residual_s(req, now_s) for req in running}
        heard = [req for req in waiting if is_heard(req)]
        residual_s = [*left_s.values(), *(self._residual_s(req, now_s) for req in heard)]
        # Of those that are late already nothing is gained by smaller rounds.
        shortest_s = min((s for s in residual_s if s > self._least_s), default=math.inf)
        packed = self._packed(sorted(running, key=lambda req: left_s[req.rid]), shortest_s)
        best_effort = [req for req in engine.with_kv if not is_heard(req)]
        batch = [*packed, *best_effort[: self.n_best_effort]]
        if self._predicted_s(batch) > shortest_s:
            self.n_best_effort = self.first
        elif shortest_s == math.inf:
            self.n_best_effort = min(2 * self.n_best_effort, 1 << 14)
        batch = [*packed, *best_effort[: self.n_best_effort]]
        # Of those that decode: a prompt's own residual time is a reason to prefill it.
        self._prefill_s = min(left_s.values(), default=math.inf) - self._predicted_s(batch)
        kept = {req.rid for req in batch}
        self._left_out = {req.rid for req in engine.with_kv} - kept
        room = max(0, self.n_best_effort - len(best_effort))
        others = [req for req in waiting if not is_heard(req)]
        engine.waiting = [*heard, *others[:room]]
        self._hidden = others[room:]
        self._take_memory(engine, heard)

    def after_round(self, engine: HybridEngine) -> None:
        engine.waiting += self._hidden
        self._hidden = []

    def prefill_tokens(self, engine: HybridEngine) -> int:
        most = engine.spec.chunk_tokens
        if not self.bounds_prefill or self._prefill_s == math.inf:
            return most
        fixed_s = self.costs.prefill_s(0, 0.0)
        per_token_s = self.costs.prefill_s(1, 0.0) - fixed_s
        n_tokens = int((self._prefill_s - fixed_s) / per_token_s)
        return min(n_tokens, most) if n_tokens >= _LEAST_SLICE_TOKENS else 0

    def must_pause(self, req: Request) -> bool:
        return req.rid in self._left_out

    @property
    def _least_s(self) -> float:
        return self.costs.decode_s(1, 0)

    @staticmethod
    def _residual_s(req: Request, now_s: float) -> float:
        listener = req.owner
        if listener.first_s is None:
            return listener.arrives_s + TTFT_S - now_s
        return listener.last_s + TPOT_S - now_s

    def _packed(self, running: list[Request], shortest_s: float) -> list[Request]:
        packed: list[Request] = []
        for req in running:
            if packed and self._predicted_s([*packed, req]) > shortest_s:
                break
            packed.append(req)
        return packed

    def _predicted_s(self, reqs: list[Request]) -> float:
        return self.costs.decode_s(len(reqs), sum(req.kv for req in reqs)) if reqs else 0.0

    def _take_memory(self, engine: HybridEngine, heard: list[Request]) -> None:
        n_tokens = sum(req.left_to_prefill + req.reserved for req in heard)
        if heard:
            victims = self._newest_best_effort(engine)
            engine.free_until(n_tokens, victims, len(heard), self._load_s)

    def _load_s(self, n_tokens: int) -> float:
        return n_tokens * self.costs.kv_token_bytes / _LINK_BYTES_PER_S


class Live(Fcfs):
    """The live policies of a thinker; `hybrid` makes way as bridge/scheduler/best_effort.py."""

    def __init__(self, size: EngineSize, policies: Policies):
        rounds = rounds_of(policies, THINKER, size.chunk_tokens)
        assert rounds is not None
        self.rounds: Rounds = rounds

    def before_prefill(self, engine: HybridEngine) -> None:
        rounds = self.rounds
        if not rounds.tells_best_effort or rounds.prefill_budget() == 0:
            return
        if engine.partial is not None and engine.partial.rid in rounds.requeue():
            engine.requeue_partial()
        if rounds.admits_others():
            queue, _ = rounds.admission_order(engine.waiting)
            by_rid = {req.rid: req for req in engine.with_kv}
            for rid in rounds.retracted_first() if queue else ():
                if engine.has_place(queue[0]):
                    break
                if rid in by_rid:
                    engine.retract_into_tree(by_rid[rid])

    def retraction_order(self, engine: HybridEngine) -> list[Request]:
        pool = engine.pool
        now = Pool(free=pool.free, total=pool.total, free_rows=pool.free_rows)
        by_rid = {req.rid: req for req in engine.with_kv}
        rids = itertools.chain(*self.rounds.retraction_order(now))
        return [by_rid[rid] for rid in rids if rid in by_rid]


ARMS = ("fcfs", "priority", "bros", "bros-bounded", "live", "hybrid")


def arm_of(name: str, costs: EngineCosts, size: EngineSize) -> Arm:
    if name == "fcfs":
        return Fcfs()
    if name == "priority":
        return Priority()
    if name == "live":
        return Live(size, Policies(order="urgency", pacing=True))
    if name == "hybrid":
        return Live(size, Policies(order="urgency", pacing=True, hybrid=True))
    assert name in ("bros", "bros-bounded"), name
    return Bros(costs, bounds_prefill=name == "bros-bounded")
