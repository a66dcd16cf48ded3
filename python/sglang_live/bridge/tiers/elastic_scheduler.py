"""A scheduler whose KV pool changes its size while it serves.

Every count of the pool's tokens follows: admission, limits of a request, idle checks, load. A
request that exceeds the pool, but not what the other engine could hand over, waits for it.
In: orders of the mover (stages/memory/kv_mover.py). Out: the pool's size, what requests need.
"""

import time
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import Any

import zmq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.managers.scheduler import _make_abort_req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.utils import TypeBasedDispatcher

from sglang_live.bridge.memory.elastic_buffers import BufferPlan, elastic_buffers
from sglang_live.bridge.scheduler.memory import MemoryScheduler
from sglang_live.bridge.session.radix import LiveRadixCache
from sglang_live.bridge.tiers.elastic_orders import RESERVE, ElasticOrders
from sglang_live.bridge.tiers.elastic_pool import ElasticPool

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


class ElasticScheduler(MemoryScheduler):
    """
    Attributes:
        elastic: None if the pool has one size.
    """

    elastic: ElasticOrders | None = None

    def init_memory_pools(self) -> None:
        self.elastic = ElasticOrders.from_env()
        self._next_need_s = 0.0
        self._too_long_since_s: dict[str, float] = {}
        if self.elastic is None:
            super().init_memory_pools()
            return
        if self.server_args.tp_size * self.server_args.pp_size > 1:
            raise RuntimeError("elastic KV needs engines of one rank: no --tp-size, no --pp-size")
        with elastic_buffers(BufferPlan(RESERVE, self.elastic.greet)):
            super().init_memory_pools()
        runner = self.tp_worker.model_runner
        if not hasattr(runner.token_to_kv_pool, "elastic_memory"):
            raise RuntimeError("elastic KV needs plain attention in every layer")
        self.elastic.pool = ElasticPool(runner.token_to_kv_pool_allocator)
        runner.max_total_num_tokens = self.elastic.pool.capacity_tokens

    def init_running_status(self) -> None:
        super().init_running_status()
        if self.elastic is not None:
            for event in self.elastic.events():
                self._poller.register(event, zmq.POLLIN)
                if self.idle_sleeper is not None:
                    self.idle_sleeper.poller.register(event, zmq.POLLIN)

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher([(ElasticRound, self._on_elastic_round)])

    # --- every round ---

    def _poll_timeout_aborts(self) -> list[Any]:
        feeds = super()._poll_timeout_aborts()
        if self.elastic is not None:
            feeds = [ElasticRound(time.monotonic()), *feeds]
        return feeds

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        # SGLang appends what rank 0 decides to the requests. Memory of which the mover told before
        # a request came has to count for it.
        orders = [req for req in recv_reqs if isinstance(req, ElasticRound)]
        if orders:
            recv_reqs = orders + [req for req in recv_reqs if not isinstance(req, ElasticRound)]
        super().process_input_requests(recv_reqs)

    def _on_elastic_round(self, order: ElasticRound) -> None:
        assert self.elastic is not None
        if self.elastic.step(order.now_s, self._evict_for_move):
            self._follow_size()
        if order.now_s >= self._next_need_s:
            self._next_need_s = order.now_s + _NEED_EVERY_S
            self._follow_size()
            self.elastic.report_need(*self._tokens_needed())
            self._fit_waiting(order.now_s)

    def _evict_for_move(self, n_tokens: int, with_sessions: bool) -> int:
        cache = self.tree_cache
        if not with_sessions and isinstance(cache, LiveRadixCache):
            return cache.evict_tree(n_tokens)
        evicted: int = cache.evict(EvictParams(num_tokens=n_tokens)).num_tokens_evicted
        return evicted

    def _tokens_needed(self) -> tuple[int, int, int]:
        """Tokens that requests need now, with the output to come, and those of idle sessions."""
        free = self.token_to_kv_pool_allocator.available_size()
        locked = self.max_total_num_tokens - free - self.tree_cache.evictable_size()
        to_come = [_tokens_to_come(req) for req in self.collect_inflight_reqs()]
        soon = sum(min(n, _SOON_TOKENS) for n in to_come)
        later = max(soon, int(self.new_token_ratio_tracker.current * sum(to_come)))
        waiting = sum(map(self._tokens_of_waiting, islice(self._that_may_grow(), _MOST_COUNTED)))
        idle = getattr(getattr(self.tree_cache, "session", None), "idle", None)
        # SGLang admits no request into what running ones may still write.
        needed = locked + waiting + (later if waiting else soon)
        return needed, locked + waiting + later, idle.tokens if idle is not None else 0

    def _that_may_grow(self) -> list[Req]:
        """Waiting requests for which the pool may grow: of best effort, one at a time."""
        waiting: list[Req] = self.waiting_queue
        if self.best_effort is None:
            return waiting
        return self.best_effort.may_take_rows(waiting)

    def _tokens_of_waiting(self, req: Req) -> int:
        # SGLang's admission asks for less than what is free.
        n_tokens: int = self._tokens_to_hold(req) + _tokens_to_come(req) + 2 * self.page_size
        return n_tokens

    # --- limits ---

    def _obtainable_tokens(self) -> int:
        """Size of the pool with all that the other engine could hand over."""
        assert self.elastic is not None and self.elastic.pool is not None
        geometry = self.elastic.pool.memory.geometry
        units = self.elastic.obtainable // geometry.granules
        most = self.elastic.pool.memory.limit_granules // geometry.granules
        return min(self.max_total_num_tokens + units * geometry.unit_rows, geometry.tokens(most))

    def _follow_size(self) -> None:
        assert self.elastic is not None and self.elastic.pool is not None
        n_tokens = self.elastic.pool.capacity_tokens
        self.max_total_num_tokens = n_tokens
        for observer in (
            self.pool_stats_observer,
            self.invariant_checker,
            self.load_inquirer,
            self.kv_events_publisher,
        ):
            # Some are frozen dataclasses, so a plain assignment raises.
            object.__setattr__(observer, "max_total_num_tokens", n_tokens)
        most = self.longest_request(self._obtainable_tokens())
        self.max_req_len = self.beam_coordinator.max_req_len = most
        self.max_req_input_len = most - 5

    def init_req_max_new_tokens(self, req: Req) -> None:
        if self.elastic is None:
            super().init_req_max_new_tokens(req)
            return
        n_tokens = self.max_total_num_tokens
        self.max_total_num_tokens = self._obtainable_tokens()
        try:
            super().init_req_max_new_tokens(req)
        finally:
            self.max_total_num_tokens = n_tokens

    def _fit_waiting(self, now_s: float) -> None:
        """Shorten or refuse waiting requests for which memory was obtainable and no longer is."""
        most = self._obtainable_tokens()
        too_long: dict[str, float] = {}
        for req in list(islice(self.waiting_queue, _MOST_COUNTED)):
            n_tokens = len(req.origin_input_ids) + len(req.output_ids)
            room = most - n_tokens - 2 * self.page_size - 1
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
        assert self.elastic is not None
        self.waiting_queue.remove(req)
        self._release_aborted_request(req)
        text = f"The request has {n_tokens} tokens; the KV pool can hold {most} now."
        reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": text}
        self.send_abort_output(_make_abort_req(req, finished_reason=reason), req)
        self.elastic.totals["elastic_refused_too_long"] += 1

    def _totals(self) -> dict[str, float]:
        own = self.elastic.report() if self.elastic is not None else {}
        return super()._totals() | own


def _tokens_to_come(req: Req) -> int:
    left = req.sampling_params.max_new_tokens - len(req.output_ids)
    return max(0, min(left, CLIP_MAX_NEW_TOKENS))
