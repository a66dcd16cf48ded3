"""An engine with best-effort requests beside those that are heard.

The loop, prefill and pool are those of the planner's simulation, so that arms differ by their
decisions only. Added here: requests lose their KV where memory is short, some of them into the
radix tree, which evicts it when others need the room. Without overlap, so that no result is in
flight when a round is chosen.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from sglang_live.bridge.best_effort_facts import BestEffortClass
from sglang_live.bridge.rounds import Rounds
from sglang_live.extensions.planner.device_model.costs import EngineCosts
from sglang_live.extensions.planner.simulation.engine.engine import (
    Consumer,
    Engine,
    EngineSpec,
)
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.engine.requests import Batch, Request
from sglang_live.extensions.planner.simulation.events import Device, Events

NAME = "thinker"
# Batches that do not expire soon, with prompts that have nothing in common.
_CLASS = BestEffortClass(math.inf, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """chunk_tokens: of a prefill round. rows: requests with KV at a time."""

    pool_tokens: int = 400_000
    rows: int = 512
    chunk_tokens: int = 8192


class Arm(Protocol):
    """What decides about rounds.

    rounds: of the live policies; None: the arm has none of them.
    """

    rounds: Rounds | None

    def before_round(self, engine: "HybridEngine", now_s: float) -> None:
        """Order the queue, free memory, choose whom the round leaves out."""
        ...

    def before_prefill(self, engine: "HybridEngine") -> None:
        """Make way for the requests that the round's prefill is for."""
        ...

    def after_round(self, engine: "HybridEngine") -> None: ...

    def prefill_tokens(self, engine: "HybridEngine") -> int:
        """The most tokens that the round's prefill may compute; 0: none."""
        ...

    def must_pause(self, req: Request) -> bool: ...

    def retraction_order(self, engine: "HybridEngine") -> list[Request]:
        """Requests as they lose their KV where a decode round has no memory."""
        ...


@dataclass(slots=True)
class Counts:
    """recomputed_tokens: KV that was lost. requeued: half-prefilled prompts that left."""

    retracted: int = 0
    recomputed_tokens: int = 0
    requeued: int = 0


class HybridEngine(Engine):
    def __init__(
        self, costs: EngineCosts, size: EngineSize, events: Events, arm: Arm, consumer: Consumer
    ):
        spec = EngineSpec(name=NAME, costs=costs, chunk_tokens=size.chunk_tokens, overlap=False)
        pool = KvPool(name=NAME, total=size.pool_tokens, rows=size.rows)
        self.device = Device(events)
        super().__init__(spec, events, self.device, pool, arm.rounds, consumer)
        self.arm, self.counts = arm, Counts()
        self._tree: dict[str, int] = {}  # KV tokens of waiting requests, the oldest first
        pool.evictable, pool.evict = lambda: sum(self._tree.values()), self._evict

    @property
    def partial(self) -> Request | None:
        """The half-prefilled prompt."""
        return self._prefill.partial

    @property
    def with_kv(self) -> list[Request]:
        """Requests that decode, or could."""
        return [req for req in (*self.running, *self.paused.values()) if not req.is_finished]

    @property
    def held_tokens(self) -> int:
        """KV tokens of all requests, those of the tree included: what the pool has in use."""
        launched = self._last.complete if self._last is not None else []
        partial = [self.partial] if self.partial is not None else []
        found = {req.rid: req for req in (*self.with_kv, *launched, *partial)}
        held = sum(req.kv for req in found.values() if not req.is_finished)
        return held + sum(self._tree.values())

    def requeue_partial(self) -> None:
        """Return the half-prefilled prompt to the queue, and its KV into the tree."""
        req = self._prefill.partial
        assert req is not None
        self._prefill.partial = None
        self.waiting.append(req)
        self.counts.requeued += 1
        self._into_tree(req)

    def retract_into_tree(self, req: Request) -> None:
        """As retract(), but what others do not need is still there when it begins again."""
        self._take_out(req)
        self.counts.retracted += 1
        self._into_tree(req)

    def has_place(self, req: Request) -> bool:
        """Whether there is a row and memory for a waiting request, as the prefill judges it."""
        reserved = sum(other.reserved for other in self.running) * self._prefill.ratio
        needed = req.cached_tokens + req.left_to_prefill + req.reserved
        return self.pool.free_rows > 0 and needed < self.pool.free - reserved

    def retract(self, req: Request, copy_s: Callable[[int], float] | None = None) -> None:
        """Drop all KV of a request, which waits again.

        copy_s: duration of a load of n tokens, if they are copied to the host before; None:
            they are computed again.
        """
        self._take_out(req)
        self.counts.retracted += 1
        n_tokens = req.kv
        if copy_s is None:
            req.cached_tokens = 0
            self.counts.recomputed_tokens += n_tokens
        else:
            req.cached_tokens = n_tokens - 1
            req.load = lambda: self._events.now_s() + copy_s(n_tokens)
        self.pool.release(req.kv)
        self._leaves(req)

    def _take_out(self, req: Request) -> None:
        if self.paused.pop(req.rid, None) is None:
            self.running = [other for other in self.running if other is not req]
        self.waiting.append(req)

    def _into_tree(self, req: Request) -> None:
        self._tree[req.rid] = req.cached_tokens = req.kv
        self._leaves(req)

    def _leaves(self, req: Request) -> None:
        self.pool.rows_used -= 1
        req.kv = req.computed = 0
        self._prefill.is_full = False
        self._note_waiting(req)

    def _evict(self, n_tokens: int) -> None:
        by_rid = {req.rid: req for req in self.waiting}
        for rid in [*self._tree]:
            n_taken = min(n_tokens, self._tree[rid])
            n_tokens -= n_taken
            self._tree[rid] -= n_taken
            by_rid[rid].cached_tokens -= n_taken
            self.counts.recomputed_tokens += n_taken
            self.pool.release(n_taken)
            if not self._tree[rid]:
                del self._tree[rid]
            if not n_tokens:
                return

    def free_until(
        self,
        n_tokens: int,
        order: Iterable[Request],
        n_rows: int = 0,
        copy_s: Callable[[int], float] | None = None,
    ) -> None:
        """Retract requests in this order until there is memory. copy_s: see retract()."""
        for req in order:
            if self.pool.free >= n_tokens and self.pool.free_rows >= n_rows:
                break
            self.retract(req, copy_s)

    def _next_batch(self, now_s: float) -> Batch | None:
        self._join_prefilled()  # before the arm looks
        if self._last is not None:
            self._last.complete = []
        if any(req.is_finished for req in self.running):
            self.running = [req for req in self.running if not req.is_finished]
            self._prefill.is_full = False
        self.arm.before_round(self, now_s)
        self._prefill.chunk_tokens = self.arm.prefill_tokens(self)
        self._make_memory()
        batch = super()._next_batch(now_s)
        self.arm.after_round(self)
        return batch

    def _make_memory(self) -> None:
        """For a decode of all that run, and the next chunk of the half-prefilled prompt."""
        needed = len(self.running)
        if self.partial is not None:
            needed += min(self.partial.left_to_prefill, self.spec.chunk_tokens)
        if self.pool.free >= needed:
            return
        # The last one goes on in any case.
        self.free_until(needed, self.arm.retraction_order(self)[:-1])

    def _before_prefill(self) -> None:
        self.arm.before_prefill(self)

    def _half_prefilled(self) -> list[str]:
        return [self.partial.rid] if self.partial and not self.partial.owner.heard else []

    def _launch_prefill(self, items: list[tuple[Request, int]], now_s: float) -> Batch:
        for req, _ in items:
            if n_tokens := self._tree.pop(req.rid, 0):
                self.pool.release(n_tokens)  # the prefill takes it for the request
        return super()._launch_prefill(items, now_s)

    def _must_pause(self, req: Request) -> bool:
        if req.is_finished or req.must_end:
            return False
        return self.arm.must_pause(req) or super()._must_pause(req)

    def _class_of(self, req: Request) -> BestEffortClass | None:
        return None if not self._tells or req.owner.heard else _CLASS

    @property
    def _tells(self) -> bool:
        return self.rounds is not None and self.rounds.tells_best_effort
