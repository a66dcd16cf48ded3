"""The part of a scheduler whose KV pool changes its size while it serves.

Every count of the pool's tokens follows: admission, limits of a request, idle checks, load. A
request that exceeds the pool, but not what the other engine could hand over, waits for it.
In: orders of the mover (mover.py). Out: the pool's size, what requests need.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.managers.scheduler import _make_abort_req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_live.bridge.cache.radix import LiveRadixCache
from sglang_live.bridge.memory.kv_memory import allocated_by
from sglang_live.bridge.scheduler.part import Part, set_frozen
from sglang_live.extensions.elastic.engine.buffers import BufferPlan, create_elastic_buffers
from sglang_live.extensions.elastic.engine.orders import RESERVE, ElasticOrders
from sglang_live.extensions.elastic.engine.pool import ElasticPool

# An engine with waiting requests tells what they need this often.
_NEED_EVERY_S = 0.05
# A prompt that has found too little memory for so long is refused: a move in progress is longer
# under way only if the other engine's requests hold its memory.
_GRACE_S = 2.0
# Output of a running request for which there should be room: of some seconds.
_SOON_TOKENS = 64
# Waiting requests that are counted. With more, the pool is too small anyway.
_MOST_COUNTED = 256


@dataclass(frozen=True, slots=True)
class ElasticRound:
    """Rank 0's order to look after the pool in this round."""

    now_s: float


if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler


class Elastic(Part):
    urgent = (ElasticRound,)

    def __init__(self, scheduler: "LiveScheduler"):
        super().__init__(scheduler)
        self._orders = ElasticOrders.from_env()
        self._next_need_s = 0.0
        self._too_long_since_s: dict[str, float] = {}

    @contextmanager
    def making_pools(self) -> Iterator[None]:
        scheduler = self._scheduler
        if scheduler.server_args.tp_size * scheduler.server_args.pp_size > 1:
            raise RuntimeError("elastic KV needs engines of one rank: no --tp-size, no --pp-size")
        plan = BufferPlan(RESERVE, self._orders.greet)
        with allocated_by(lambda _, pool: create_elastic_buffers(plan, pool)):
            yield
        runner = scheduler.tp_worker.model_runner
        if not hasattr(runner.token_to_kv_pool, "elastic_memory"):
            raise RuntimeError("elastic KV needs plain attention in every layer")
        self._pool = ElasticPool(runner.token_to_kv_pool_allocator)
        self._orders.pool = self._pool
        runner.max_total_num_tokens = self._pool.capacity_tokens

    def start(self) -> None:
        for event in self._orders.events():
            self._scheduler.channel.wake_on(event)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {ElasticRound: self._on_elastic_round}

    def feeds(self, now_s: float) -> list[Any]:
        # Memory of which the mover told before a request came has to count for it: it is urgent.
        return [ElasticRound(now_s)]

    def _on_elastic_round(self, order: ElasticRound) -> None:
        if self._orders.step(order.now_s, self._evict_for_move):
            self._follow_size()
        if order.now_s >= self._next_need_s:
            self._next_need_s = order.now_s + _NEED_EVERY_S
            self._follow_size()
            self._orders.report_need(*self._tokens_needed())
            self._fit_waiting(order.now_s)

    def _evict_for_move(self, n_tokens: int, with_sessions: bool) -> int:
        cache = self._scheduler.tree_cache
        if not with_sessions and isinstance(cache, LiveRadixCache):
            return cache.evict_tree(n_tokens)
        evicted: int = cache.evict(EvictParams(num_tokens=n_tokens)).num_tokens_evicted
        return evicted

    def _tokens_needed(self) -> tuple[int, int, int]:
        """Tokens that requests need now, with the output to come, and those of idle sessions."""
        scheduler = self._scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        locked = scheduler.max_total_num_tokens - free - scheduler.tree_cache.evictable_size()
        to_come = [_tokens_to_come(req) for req in scheduler.collect_inflight_reqs()]
        soon = sum(min(n, _SOON_TOKENS) for n in to_come)
        later = max(soon, int(scheduler.new_token_ratio_tracker.current * sum(to_come)))
        waiting = sum(map(self._tokens_of_waiting, islice(self._that_may_grow(), _MOST_COUNTED)))
        idle = getattr(getattr(scheduler.tree_cache, "session", None), "idle", None)
        # SGLang admits no request into what running ones may still write.
        needed = locked + waiting + (later if waiting else soon)
        return needed, locked + waiting + later, idle.tokens if idle is not None else 0

    def _that_may_grow(self) -> list[Req]:
        """Waiting requests for which the pool may grow: of best effort, one at a time."""
        waiting: list[Req] = self._scheduler.waiting_queue
        for part in self._scheduler.parts:
            waiting = part.entitled(waiting)
        return waiting

    def _tokens_of_waiting(self, req: Req) -> int:
        # SGLang's admission asks for less than what is free.
        n_tokens = self._scheduler.memory.tokens_to_hold(req) + _tokens_to_come(req)
        return n_tokens + 2 * self._scheduler.page_size

    # --- limits ---

    def obtainable_tokens(self, n_tokens: int) -> int:
        geometry = self._pool.memory.geometry
        units = self._orders.obtainable // geometry.granules
        most = self._pool.memory.limit_granules // geometry.granules
        return min(n_tokens + units * geometry.unit_rows, geometry.tokens(most))

    def _most_tokens(self) -> int:
        return self.obtainable_tokens(self._scheduler.max_total_num_tokens)

    def _follow_size(self) -> None:
        scheduler = self._scheduler
        n_tokens = self._pool.capacity_tokens
        scheduler.max_total_num_tokens = n_tokens
        for observer in (
            scheduler.pool_stats_observer,
            scheduler.invariant_checker,
            scheduler.load_inquirer,
            scheduler.kv_events_publisher,
        ):
            set_frozen(observer, "max_total_num_tokens", n_tokens)
        most = scheduler.memory.longest_request(self._most_tokens())
        scheduler.max_req_len = scheduler.beam_coordinator.max_req_len = most
        scheduler.max_req_input_len = most - 5

    def _fit_waiting(self, now_s: float) -> None:
        """Shorten or refuse waiting requests for which memory was obtainable and no longer is."""
        most = self._most_tokens()
        too_long: dict[str, float] = {}
        for req in list(islice(self._scheduler.waiting_queue, _MOST_COUNTED)):
            n_tokens = len(req.origin_input_ids) + len(req.output_ids)
            room = most - n_tokens - 2 * self._scheduler.page_size - 1
            if room > 0:
                params = req.sampling_params
                most_new = len(req.output_ids) + room
                params.max_new_tokens = min(params.max_new_tokens, most_new)
                continue
            since_s = self._too_long_since_s.get(req.rid, now_s)
            too_long[req.rid] = since_s
            if now_s - since_s > _GRACE_S:
                self._refuse(req, n_tokens, most)
        self._too_long_since_s = too_long

    def _refuse(self, req: Req, n_tokens: int, most: int) -> None:
        scheduler = self._scheduler
        scheduler.waiting_queue.remove(req)
        scheduler._release_aborted_request(req)
        text = f"The request has {n_tokens} tokens; the KV pool can hold {most} now."
        reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": text}
        scheduler.send_abort_output(_make_abort_req(req, finished_reason=reason), req)
        self._orders.totals["elastic_refused_too_long"] += 1

    def totals(self) -> dict[str, float]:
        return self._orders.report()


def _tokens_to_come(req: Req) -> int:
    left = req.sampling_params.max_new_tokens - len(req.output_ids)
    return max(0, min(left, CLIP_MAX_NEW_TOKENS))
