"""Memory of a scheduler: what requests need, and which are retracted where it is short.

SGLang looks at the running batch only, but paused requests and half-prefilled prompts hold KV as
well. The order is the policy's (policy/urgency.py); without one the longest goes first.
Owner: one Memory per scheduler; equal on all ranks.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, release_req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_live.bridge.cache.truncate import n_computed, n_kept, streaming_sessions
from sglang_live.bridge.round_facts import Pool
from sglang_live.bridge.scheduler.part import Part
from sglang_live.bridge.scheduler.paused import PausedRequest


class Memory(Part):
    def start(self) -> None:
        self._counts = dict.fromkeys(("paused_retracted", "running_retracted", "retracted"), 0.0)
        parts = self._scheduler.parts
        orders = [p for p in parts if type(p).retraction_order is not Part.retraction_order]
        self._is_ordered = bool(orders)

    def queues(self, req: Req, is_retracted: bool) -> None:
        self._counts["retracted"] += is_retracted

    def totals(self) -> dict[str, float]:
        return self._counts

    # --- what there is, and what requests need ---

    def longest_request(self, pool_tokens: int) -> int:
        """The most tokens, prompt and response, for which a request does not wait forever.

        SGLang admits a request while more is free than its tokens and a page. The last pages of a
        pool are never more than that, if a page has several tokens.
        """
        page_size = self._scheduler.page_size
        unusable = 1 if page_size == 1 else 2 * page_size
        return int(min(self._scheduler.model_config.context_len - 1, pool_tokens - unusable))

    def state(self) -> Pool:
        """The pool as policies see it."""
        scheduler = self._scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        sessions = streaming_sessions(scheduler.tree_cache)
        evicts = hasattr(sessions, "idle")
        pool = Pool(
            free=free + scheduler.tree_cache.evictable_size(),
            total=scheduler.max_total_num_tokens,
            free_rows=scheduler.req_to_token_pool.available_size(),
            idle=sessions.idle.tokens if evicts else 0,
            wanted=evicts and sessions.preloads.waits_for_room,
        )
        for part in scheduler.parts:
            pool = part.pool(pool)
        return pool

    def tokens_to_prefill(self, req: Req) -> int:
        return max(1, self._tokens_beside(req, n_computed))

    def tokens_to_hold(self, req: Req) -> int:
        """Memory that a waiting request needs for its prefill, where evictable KV counts as free.

        That of its own session does, too; and what is on the host needs as much as what is
        computed.
        """
        return max(1, self._tokens_beside(req, n_kept))

    def _tokens_beside(self, req: Req, of_session: Callable[[Any, str], int]) -> int:
        """Tokens of a request that are not among those of its session."""
        n_tokens = len(req.origin_input_ids) + len(req.output_ids)
        if req.session is None:
            return n_tokens
        streaming = streaming_sessions(self._scheduler.tree_cache)
        return n_tokens - of_session(streaming, req.session.session_id)

    def missing_tokens(self, req: Req, running: list[Req], free: int) -> float:
        """Tokens by which a request's prefill and decode exceed memory; below 0: they fit.

        By the measure of upstream's PrefillAdder: beside the tokens that the running requests are
        expected to decode.
        """
        needed = self.tokens_to_hold(req) + decode_tokens_left(req) + self._scheduler.page_size
        ratio = self._scheduler.new_token_ratio_tracker.current
        promised = sum(
            decode_tokens_left(one) * (1.0 if one.sampling_params.ignore_eos else ratio)
            for one in running
        )
        return needed + promised - free

    def fits(self, req: Req, running: list[Req], free: int) -> bool:
        """Whether a request's prefill and decode fit into memory."""
        return self.missing_tokens(req, running, free) <= 0

    def has_place(self, req: Req, running_batch: ScheduleBatch) -> bool:
        """Whether there are memory, a row and a place in the batch for a waiting request."""
        scheduler = self._scheduler
        n_running = len(running_batch.reqs)
        if scheduler.get_num_allocatable_reqs(n_running, running_batch=running_batch) <= 0:
            return False
        return self.fits(req, running_batch.reqs, self.state().free)

    # --- rows of idle sessions ---

    def before_round(self) -> None:
        """Evict idle sessions' rows until each waiting request can have one."""
        scheduler = self._scheduler
        waiting = scheduler.waiting_queue
        n_free = scheduler.req_to_token_pool.available_size()
        if n_free >= len(waiting) or not self._evicts_sessions():
            return
        for part in scheduler.parts:
            waiting = part.entitled(waiting)
        if n_free >= len(waiting):
            return
        sessions = scheduler.tree_cache.session
        ids = [req.session.session_id if req.session else None for req in waiting]
        n_needed = max(1, sum(not sessions.has_row(session_id) for session_id in ids))
        if n_needed > n_free:
            sessions.evict_rows(n_needed - n_free)

    def _evicts_sessions(self) -> bool:
        sessions = streaming_sessions(self._scheduler.tree_cache)
        return bool(getattr(sessions, "evicts_idle", False))

    # --- retraction ---

    def make_room(self, batch: ScheduleBatch) -> bool:
        """Retract requests until the batch can decode: of those that have time, the one with the
        lowest utility first; then half-prefilled prompts; then the others, blocked ones first. One
        stays in the batch. Returns False if it lacks the memory of a paused request whose last step
        is in flight, which can be retracted in the next round: upstream would abort the batch.
        """
        scheduler = self._scheduler
        if not (self._is_ordered or self._paused or scheduler.partial_prefills()):
            return True
        free = scheduler.token_to_kv_pool_allocator.available_size()
        if free > 2 * scheduler.page_size * len(batch.reqs):
            return True
        for part in scheduler.parts:
            part.before_retraction(batch)
        n_before = len(batch.reqs)
        batch.filter_batch()  # those that have ended need no memory
        n_running = len(batch.reqs)
        for rid in self._retraction_order():
            if batch.check_decode_mem():
                break
            if {req.rid for req in batch.reqs} != {rid}:
                self.retract_one(rid, batch)
        if len(batch.reqs) < n_running:
            # As upstream after a retraction, but no request is admitted more easily for it.
            tracker = scheduler.new_token_ratio_tracker
            estimate = tracker.estimate_new_token_ratio_after_retract(batch.reqs)
            tracker.current = max(tracker.current, estimate)
        if len(batch.reqs) < n_before:
            batch.batch_is_full = False
        in_flight = any(p.step_in_flight for p in self._paused.values() if not p.req.finished())
        return not in_flight or not batch.reqs or batch.check_decode_mem()

    @property
    def _paused(self) -> dict[str, PausedRequest]:
        return self._scheduler.pausing.requests

    def _retraction_order(self) -> list[str]:
        scheduler, pausing = self._scheduler, self._scheduler.pausing
        half = scheduler.partial_prefills()
        half.sort(key=lambda req: (-prefill_tokens_left(req), req.rid))
        half_rids = [req.rid for req in half]
        blocked = [rid for rid, paused in self._paused.items() if pausing.blocked(paused.req)]
        for part in scheduler.parts:
            if (order := part.retraction_order(self.state(), blocked)) is not None:
                have_time, others = order
                return [*have_time, *half_rids, *others]
        longest = sorted(self._paused.values(), key=lambda one: -len(one.req.output_ids))
        return [*half_rids, *(paused.req.rid for paused in longest)]

    def retract_one(self, rid: str, batch: ScheduleBatch) -> bool:
        """Retract a paused, running or half-prefilled request. Returns False if that frees no
        memory, or is not possible now.
        """
        if (paused := self._paused.get(rid)) is not None:
            if paused.step_in_flight or paused.req.finished() or not self._frees(paused.req):
                return False
            del self._paused[rid]
            self._counts["paused_retracted"] += 1
            self.retract(paused.req, len(batch.reqs))
            return True
        for req in self._scheduler.partial_prefills():
            if req.rid == rid:
                return self._retract_half_prefilled(req, len(batch.reqs))
        return self._retract_running(rid, batch)

    def _retract_half_prefilled(self, req: Req, n_running: int) -> bool:
        if self._scheduler.may_requeue(req):
            for part in self._scheduler.parts:
                part.retracted(req)
            self.requeue(req, n_running)
            return True
        if not self._frees(req):
            return False
        if not any(part.removes_prefill(req, retracts=True) for part in self._scheduler.parts):
            return False
        self.retract(req, n_running)
        return True

    def requeue(self, req: Req, n_running: int) -> None:
        """Return a half-prefilled request to the queue, its KV to the tree."""
        if not any(part.removes_prefill(req, retracts=False) for part in self._scheduler.parts):
            self._scheduler.chunked_req = None
        self._release(req, n_running)
        self._scheduler._add_request_to_queue(req, is_retracted=True)

    def _retract_running(self, rid: str, batch: ScheduleBatch) -> bool:
        at = next((at for at, req in enumerate(batch.reqs) if req.rid == rid), None)
        if at is None:
            return False
        req = batch.reqs[at]
        if req.finished() or req.to_finish is not None or req.beam_group is not None:
            return False
        if not self._frees(req):
            return False
        self._counts["running_retracted"] += 1
        self.retract(req, len(batch.reqs) - 1)
        batch.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i != at])
        return True

    def retract(self, req: Req, n_running: int) -> None:
        for part in self._scheduler.parts:
            part.retracted(req)
        self._release(req, n_running)
        self._scheduler._add_request_to_queue(req, is_retracted=True)

    def _release(self, req: Req, n_running: int) -> None:
        scheduler = self._scheduler
        if any(part.releases(req) for part in scheduler.parts):
            return
        release_req(
            req=req,
            remaing_req_count=n_running,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )

    def _frees(self, req: Req) -> bool:
        """Whether the request's retraction frees memory: its session would keep its KV, unless
        idle sessions are evictable."""
        return req.session is None or self._evicts_sessions()


def prefill_tokens_left(req: Req) -> int:
    """Tokens to compute of a prompt whose first prefix_len tokens are computed."""
    total = len(req.origin_input_ids) + len(req.output_ids)
    return max(1, total - req.prefix_len)


def decode_tokens_left(req: Req) -> int:
    """Tokens that SGLang's PrefillAdder reserves for the request's decode."""
    tokens = req.sampling_params.max_new_tokens - len(req.output_ids)
    return max(0, min(tokens, CLIP_MAX_NEW_TOKENS))
