"""SGLang's scheduler under memory pressure: which requests are retracted, and when.

SGLang looks at the running batch only, but paused requests and half-prefilled prompts hold KV as
well. The order is the policy's (policy/retraction.py).
"""

from collections.abc import Iterable

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, release_req

from sglang_live.bridge.round_facts import Pool
from sglang_live.bridge.scheduler.best_effort import BestEffort
from sglang_live.bridge.scheduler.paused import PausedRequest
from sglang_live.bridge.scheduler.reporting import ReportingScheduler
from sglang_live.bridge.scheduler.sliced_prefill import (
    SlicedPrefill,
    decode_tokens_left,
    prefill_tokens_left,
)
from sglang_live.bridge.session.truncate import n_computed, n_kept, streaming_sessions


class MemoryScheduler(ReportingScheduler):
    """
    Attributes:
        paused: by request id.
        sliced_prefill: None if a prompt is prefilled without interruption.
        best_effort: None if no policy tells best-effort work from other work.
        kv_by_tokens: whether a request's token ids determine its KV.
    """

    kv_by_tokens = True
    max_req_len: int  # SGLang's
    max_req_input_len: int  # SGLang's

    def init_model_worker(self) -> None:
        super().init_model_worker()
        self.max_req_len = min(self.max_req_len, self.longest_request(self.max_total_num_tokens))
        self.max_req_input_len = min(self.max_req_input_len, self.max_req_len - 5)

    def longest_request(self, pool_tokens: int) -> int:
        """The most tokens, prompt and response, for which a request does not wait forever.

        SGLang admits a request while more is free than its tokens and a page. The last pages of a
        pool are never more than that, if a page has several tokens.
        """
        unusable = 1 if self.page_size == 1 else 2 * self.page_size
        return int(min(self.model_config.context_len - 1, pool_tokens - unusable))

    def init_running_status(self) -> None:
        super().init_running_status()
        self.paused: dict[str, PausedRequest] = {}
        # SGLang limits the LoRA adapters of a batch, and with pipeline stages each microbatch has
        # its own half-prefilled prompt.
        is_supported = not self.enable_lora and self.server_args.pp_size == 1
        slices_prefill = is_supported and self.rounds is not None and self.rounds.slices_prefill
        self.sliced_prefill = SlicedPrefill(self) if slices_prefill else None
        is_told = self.rounds is not None and self.rounds.tells_best_effort
        self.best_effort = BestEffort(self, into_tree=self.kv_by_tokens) if is_told else None

    def partial_prefills(self) -> list[Req]:
        """Prompts between two chunks."""
        if self.sliced_prefill is not None:
            return self.sliced_prefill.partial_prefills()
        return [] if self.chunked_req is None else [self.chunked_req]

    def _blocked(self, req: Req) -> bool:
        """Whether the input of the request's next step does not exist yet."""
        return False

    def _preempted_prefills(self) -> list[Req]:
        return [req for req in self.partial_prefills() if req is not self.chunked_req]

    def _make_rows(self) -> None:
        """Evict idle sessions' rows until each waiting request can have one; of best effort, one
        request while none has a row."""
        n_free = self.req_to_token_pool.available_size()
        if n_free >= len(self.waiting_queue) or not self._evict_sessions():
            return
        waiting = self.waiting_queue
        if self.best_effort is not None:
            waiting = self.best_effort.may_take_rows(waiting)
            if n_free >= len(waiting):
                return
        sessions = self.tree_cache.session
        ids = [req.session.session_id if req.session else None for req in waiting]
        n_needed = max(1, sum(not sessions.has_row(session_id) for session_id in ids))
        if n_needed > n_free:
            sessions.evict_rows(n_needed - n_free)

    def _retract_for(self, waiting: list[Req], running_batch: ScheduleBatch) -> None:
        """Retract one request that has time, if memory is short for the first urgent one of the
        waiting requests and none was admitted. It would otherwise hold its KV until its buffer is
        played. Running requests are retracted only where a listener waits.
        """
        assert self.rounds is not None
        if not self.req_to_token_pool.available_size():
            return
        urgent = next((r for r in waiting if not self.rounds.is_well_buffered(r.rid)), None)
        if urgent is None or self.fits(urgent, running_batch.reqs, self._pool().free):
            return
        is_heard = self.rounds.table.is_managed(urgent.rid)
        for rid in self.rounds.spare(self._pool()):
            if (is_heard or rid in self.paused) and self._retract_one(rid, running_batch):
                running_batch.batch_is_full = False
                return

    def fits(self, req: Req, running: list[Req], free: int) -> bool:
        """Whether a request's prefill and decode fit into memory."""
        return self.missing_tokens(req, running, free) <= 0

    def missing_tokens(self, req: Req, running: list[Req], free: int) -> float:
        """Tokens by which a request's prefill and decode exceed memory; below 0: they fit.

        By the measure of upstream's PrefillAdder: beside the tokens that the running requests are
        expected to decode.
        """
        needed = self._tokens_to_hold(req) + decode_tokens_left(req) + self.page_size
        ratio = self.new_token_ratio_tracker.current
        promised = sum(
            decode_tokens_left(one) * (1.0 if one.sampling_params.ignore_eos else ratio)
            for one in running
        )
        return needed + promised - free

    def has_place(self, req: Req, running_batch: ScheduleBatch) -> bool:
        """Whether there are memory, a row and a place in the batch for a waiting request."""
        n_running = len(running_batch.reqs)
        if self.get_num_allocatable_reqs(n_running, running_batch=running_batch) <= 0:
            return False
        return self.fits(req, running_batch.reqs, self._pool().free)

    def _make_room(self, batch: ScheduleBatch) -> bool:
        """Retract requests until the batch can decode: of those that have time, the one with the
        lowest utility first; then half-prefilled prompts; then the others, blocked ones first. One
        stays in the batch. Returns False if it lacks the memory of a paused request whose last step
        is in flight, which can be retracted in the next round: upstream would abort the batch.
        """
        if self.token_to_kv_pool_allocator.available_size() > 2 * self.page_size * len(batch.reqs):
            return True
        if self.best_effort is not None:
            self.best_effort.leave_sessions(batch)
        n_before = len(batch.reqs)
        batch.filter_batch()  # those that have ended need no memory
        n_running = len(batch.reqs)
        well_buffered: list[str] = []
        if self.rounds is None:  # the talker's requests that wait for text
            others = [p.req.rid for p in _longest_first(self.paused.values())]
        else:
            blocked = [rid for rid, paused in self.paused.items() if self._blocked(paused.req)]
            well_buffered, others = self.rounds.retraction_order(self._pool(), blocked)
        half = sorted(self.partial_prefills(), key=lambda req: (-prefill_tokens_left(req), req.rid))
        for rid in (*well_buffered, *(req.rid for req in half), *others):
            if batch.check_decode_mem():
                break
            if {req.rid for req in batch.reqs} != {rid}:
                self._retract_one(rid, batch)
        if len(batch.reqs) < n_running:
            # As upstream after a retraction, but no request is admitted more easily for it.
            tracker = self.new_token_ratio_tracker
            estimate = tracker.estimate_new_token_ratio_after_retract(batch.reqs)
            tracker.current = max(tracker.current, estimate)
        if len(batch.reqs) < n_before:
            batch.batch_is_full = False
        in_flight = any(p.step_in_flight for p in self.paused.values() if not p.req.finished())
        return not in_flight or not batch.reqs or batch.check_decode_mem()

    def _retract_one(self, rid: str, batch: ScheduleBatch) -> bool:
        """Retract a paused, running or half-prefilled request. Returns False if that frees no
        memory, or is not possible now.
        """
        if (paused := self.paused.get(rid)) is not None:
            if not self._can_retract(paused):
                return False
            self._retract_paused(paused.req, len(batch.reqs))
            return True
        for req in self.partial_prefills():
            if req.rid == rid:
                return self._retract_half_prefilled(req, len(batch.reqs))
        return self._retract_running(rid, batch)

    def _retract_half_prefilled(self, req: Req, n_running: int) -> bool:
        if self.best_effort is not None and req in self.best_effort.half_prefilled():
            self.best_effort.retracted(req)
            self.requeue(req, n_running)
            return True
        if self.sliced_prefill is None or not self._frees_memory(req):
            return False
        self.sliced_prefill.retract(req)
        self._retract(req, n_running)
        return True

    def requeue(self, req: Req, n_running: int) -> None:
        """Return a half-prefilled best-effort request to the queue."""
        if self.sliced_prefill is not None:
            self.sliced_prefill.remove(req)
        else:
            self.chunked_req = None
        self._release(req, n_running)
        self._add_request_to_queue(req, is_retracted=True)

    def _retract_running(self, rid: str, batch: ScheduleBatch) -> bool:
        at = next((at for at, req in enumerate(batch.reqs) if req.rid == rid), None)
        if at is None:
            return False
        req = batch.reqs[at]
        if req.finished() or req.to_finish is not None or req.beam_group is not None:
            return False
        if not self._frees_memory(req):
            return False
        self._counts["running_retracted"] += 1
        self._retract(req, len(batch.reqs) - 1)
        batch.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i != at])
        return True

    def _retract_paused(self, req: Req, n_running: int) -> None:
        del self.paused[req.rid]
        self._counts["paused_retracted"] += 1
        self._retract(req, n_running)

    def _retract(self, req: Req, n_running: int) -> None:
        if self.best_effort is not None:
            self.best_effort.retracted(req)
        self._release(req, n_running)
        self._add_request_to_queue(req, is_retracted=True)

    def _release(self, req: Req, n_running: int) -> None:
        if self.best_effort is not None and self.best_effort.release_into_tree(req):
            return
        release_req(
            req=req,
            remaing_req_count=n_running,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
        )

    def _can_retract(self, paused: PausedRequest) -> bool:
        if paused.step_in_flight or paused.req.finished():
            return False
        return self._frees_memory(paused.req)

    def _frees_memory(self, req: Req) -> bool:
        # The session of a retracted request keeps its KV: that frees memory only if idle sessions
        # are evictable.
        return req.session is None or self._evict_sessions()

    def _evict_sessions(self) -> bool:
        return getattr(getattr(self.tree_cache, "session", None), "idle", None) is not None

    def _tokens_to_prefill(self, req: Req) -> int:
        n_tokens = len(req.origin_input_ids) + len(req.output_ids)
        streaming = streaming_sessions(self.tree_cache)
        if req.session is not None and streaming is not None:
            n_tokens -= n_computed(streaming, req.session.session_id)
        return max(1, n_tokens)

    def _tokens_to_hold(self, req: Req) -> int:
        """Memory that a waiting request needs for its prefill, where evictable KV counts as free.

        That of its own session does, too; and what is on the host needs as much as what is
        computed.
        """
        n_tokens = len(req.origin_input_ids) + len(req.output_ids)
        streaming = streaming_sessions(self.tree_cache)
        if req.session is not None and streaming is not None:
            n_tokens -= n_kept(streaming, req.session.session_id)
        return max(1, n_tokens)

    def _pool(self) -> Pool:
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        rows = self.req_to_token_pool.available_size()
        streaming = streaming_sessions(self.tree_cache)
        idle = getattr(streaming, "idle", None)
        preloads = getattr(streaming, "preloads", None)
        return Pool(
            free=free,
            total=self.max_total_num_tokens,
            free_rows=rows,
            idle=0 if idle is None else idle.tokens,
            wanted=preloads is not None and preloads.waits_for_room,
        )


def _longest_first(paused: Iterable[PausedRequest]) -> list[PausedRequest]:
    return sorted(paused, key=lambda one: len(one.req.output_ids), reverse=True)
