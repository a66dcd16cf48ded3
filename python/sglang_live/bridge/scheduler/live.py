"""SGLang's scheduler, with requests that pause and resume by the policies' decisions.

In: decisions of bridge/rounds.py. Out: the batches that SGLang's loop runs. With the policies off
and no request blocked, every round is SGLang's own.
Used by the thinker's engine; the talker's scheduler is a subclass.
"""

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch

from sglang_live.bridge.batch_work import Launch
from sglang_live.bridge.scheduler import batch_times
from sglang_live.bridge.scheduler.best_effort import PRIORITY, PRIORITY_OF_OTHERS, class_of
from sglang_live.bridge.scheduler.fault_injection import FaultInjection
from sglang_live.bridge.scheduler.paused import PausedRequest, ReqsView, decode_batch_of
from sglang_live.bridge.scheduler.progress import ProgressCell
from sglang_live.bridge.scheduler.round_log import RoundLog
from sglang_live.bridge.scheduler.sliced_prefill import audio_within
from sglang_live.bridge.scheduler.sync_log import SyncLog
from sglang_live.bridge.session.cache import SessionCache
from sglang_live.bridge.tiers.lender_scheduler import LenderScheduler
from sglang_live.engine_channel.messages import HEARD_PREFIXES, TURN_PREFILL_PREFIX
from sglang_live.policy.config import THINKER

# Longest wait for input while every request is paused. A message ends the wait at once.
IDLE_WAIT_MS = 20
_IDLE_SLEEP_S = 1.0  # SGLang's own, in an engine without work


class LiveScheduler(LenderScheduler):
    policy_config = THINKER

    # --- setting up ---

    def init_running_status(self) -> None:
        super().init_running_status()
        if not self.spec_algorithm.is_none() or self.attn_dp_enabled:
            raise RuntimeError("pausing requests excludes speculation and DP attention")
        self._tiers_wait_s = _IDLE_SLEEP_S  # for which loads of KV can wait for the next round
        self._progress = ProgressCell.from_env() if self.outbox is not None else None
        self._round_log = RoundLog.from_env(self)
        self._fault_injection = FaultInjection.from_env() if self.policy_config is THINKER else None
        SyncLog.begin_from_env("thinker" if self.policy_config is THINKER else "talker")

    def init_invariant_checker(self) -> None:
        super().init_invariant_checker()
        self._observe(self.invariant_checker, self._holding_kv)

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        self._observe(self.load_inquirer, self._running_and_paused)

    def _observe(self, observer: Any, reqs_view: Callable[[], ScheduleBatch | ReqsView]) -> None:
        # The observers are frozen dataclasses, so a plain assignment raises.
        object.__setattr__(observer, "get_running_batch", reqs_view)

    def _running_and_paused(self) -> ScheduleBatch | ReqsView:
        if not self.paused and not self._preempted_prefills():
            return self.running_batch
        paused = [p.req for p in self.paused.values()]
        return ReqsView([*self.running_batch.reqs, *paused, *self._preempted_prefills()])

    def _holding_kv(self) -> ScheduleBatch | ReqsView:
        """As above, plus the half-prefilled prompt, which is in no batch in a decode round."""
        view = self._running_and_paused()
        return view if self.chunked_req is None else ReqsView([*view.reqs, self.chunked_req])

    # --- pause and resume ---

    def _any_blocked(self) -> bool:
        """Whether some request may be blocked; saves the check of each."""
        return False

    def _must_pause(self, req: Req) -> bool:
        must_end = len(req.output_ids) >= req.sampling_params.max_new_tokens
        if req.finished() or req.to_finish is not None or must_end:
            return False
        return self._blocked(req) or (self.rounds is not None and self.rounds.pause(req.rid))

    def _pause_requests(self, batch: ScheduleBatch) -> None:
        if not self._any_blocked() and (self.rounds is None or not self.rounds.pauses_any()):
            return
        pause = [self._must_pause(req) for req in batch.reqs]
        if not any(pause):
            return
        for index, pauses in enumerate(pause):
            if pauses:
                paused = PausedRequest.of(batch, index)
                self.paused[paused.req.rid] = paused
                if self.rounds is not None and not self._blocked(paused.req):
                    self.rounds.paused(paused.req.rid)
        batch.filter_batch(keep_indices=[i for i, pauses in enumerate(pause) if not pauses])
        batch.batch_is_full = False

    def _resume(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        back = []
        for paused in [p for p in self.paused.values() if not self._must_pause(p.req)]:
            if not paused.req.finished():
                if paused.step_in_flight:
                    continue
                back.append(paused)
            # With overlap it may have ended in the step that was in flight when it was paused.
            del self.paused[paused.req.rid]
            if self.rounds is not None:
                self.rounds.resumed(paused.req.rid)
        if not back:
            return running_batch
        batch = decode_batch_of(self, back)
        if running_batch.is_empty():
            batch.batch_is_full = running_batch.batch_is_full
            return batch
        running_batch.merge_batch(batch)
        return running_batch

    # --- a round ---

    def get_next_batch_to_run(self, running_batch, last_batch) -> NextBatchPlan:
        if self.retention is not None:
            self.retention.settle()
            self._make_rows()
        if self.rounds is not None:
            blocked = [
                r for r, p in self.paused.items() if p.step_in_flight or self._blocked(p.req)
            ]
            partial_prefills = self.partial_prefills()
            if self.sliced_prefill is not None:
                blocked += [req.rid for req in partial_prefills]
            half = self.best_effort.half_prefilled() if self.best_effort is not None else []
            self.rounds.decide(
                self._pool(),
                prefill_running=len(partial_prefills) > len(half),
                blocked=blocked,
                half=[req.rid for req in half],
            )
            if self.device_peers is not None:
                self.device_peers.publish(self.rounds)
        if self._reports:
            self.report()
        if self.paused:
            running_batch = self._resume(running_batch)
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        if self.tier_events is not None:
            self._tiers_wait_s = self.tier_events.load_ahead()
        if self.rounds is not None and (events := self.rounds.take_events()) and self.outbox:
            self.outbox.send(events)
        if self._round_log is not None:
            self._round_log.write(plan)
        if plan.batch_to_run is None and last_batch is None:
            held = self.rounds is not None and not plan.running_batch.is_empty()
            if held or self._awaits_input():
                self._wait_for_input(held)
        return plan

    def _awaits_input(self) -> bool:
        """Whether requests can go on after a message or some time, if no batch can run now."""
        is_deferred = self.rounds is not None and self.rounds.prefill_budget() == 0
        return bool(self.paused) or is_deferred

    def _wait_for_input(self, decodes: bool) -> None:
        limit_s = min(IDLE_WAIT_MS / 1000, self._tiers_wait_s)
        if self.rounds is not None:
            limit_s = min(limit_s, self.rounds.wait_limit_s(decodes=decodes))
        self._poll(limit_s)

    def _poll(self, limit_s: float) -> None:
        """Wait on rank 0; the other ranks then wait in the broadcast of its input."""
        if self.inbox is not None:
            self._poller.poll(max(1, round(1000 * limit_s)))

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        self._pause_requests(running_batch)
        if self.best_effort is not None:
            self.best_effort.before_prefill(running_batch)
        queue, later = self._admission_order(self.waiting_queue)
        waiting = [*queue, *later]
        if self.tier_events is not None:
            queue, loading = self.tier_events.ready(queue, running_batch.reqs)
            later = loading + later
        budget = self.rounds.prefill_budget() if self.rounds is not None else None
        if budget == 0:
            # Upstream has stored a half-prefilled prompt's last chunk already.
            if self.rounds is not None and (self.waiting_queue or self.chunked_req is not None):
                self.rounds.totals["prefill_put_off"] += 1
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        if self.sliced_prefill is not None:
            chosen = self.sliced_prefill.choose(queue, running_batch.reqs)
            if chosen is None:
                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
            queue, others, most = chosen
            later = others + later
            budget = min((n for n in (budget, most) if n is not None), default=None)
        plan = self._prefill(queue, later, budget, running_batch)
        if self.rounds is not None and plan.batch_to_run is None and waiting:
            self._retract_for(waiting, plan.running_batch)
        return plan

    def _prefill(
        self, queue: list[Req], later: list[Req], budget: int | None, running_batch: ScheduleBatch
    ) -> NextBatchPlan:
        """Run SGLang's prefill admission on `queue`.

        Args:
            later: requests that stay in the waiting queue.
            budget: tokens of this prefill; None: the engine's own chunk.
        """
        own_chunk = self.chunked_prefill_size
        if budget is not None and own_chunk:
            pages = max(1, budget // self.page_size)
            self.chunked_prefill_size = min(own_chunk, pages * self.page_size)
            n_tokens = map(self._tokens_to_prefill, queue)
            queue, beyond = audio_within(budget, queue, n_tokens)
            later = beyond + later
        self.waiting_queue = queue
        try:
            plan = super().get_new_batch_prefill(running_batch)
            if (
                plan.batch_to_run is None
                and self.chunked_req is None
                and self.sliced_prefill is not None
                and self._preempted_prefills()
            ):
                self.sliced_prefill.resume()  # the preempting prompts do not fit after all
                later, self.waiting_queue = self.waiting_queue + later, []
                plan = super().get_new_batch_prefill(plan.running_batch)
        finally:
            self.chunked_prefill_size = own_chunk
        self.waiting_queue.extend(later)
        if self.rounds is not None and plan.batch_to_run is not None:
            self._launched(plan.batch_to_run.reqs)
        return plan

    def _launched(self, reqs: list[Req]) -> None:
        assert self.rounds is not None
        if self.sliced_prefill is not None:
            self.sliced_prefill.launched(reqs)
        for req in reqs:
            self.rounds.table.admit(req.rid, self.rounds.now_s)

    def _admission_order(self, waiting: list[Req]) -> tuple[list[Req], list[Req]]:
        """The waiting requests to try in this round, in order, and those that stay in the queue."""
        if self.rounds is None:
            return waiting, []
        return self.rounds.admission_order(waiting)

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        self._pause_requests(batch)  # rounds in which prefill was deferred
        if batch.is_empty():
            batch.batch_is_full = False
            return batch
        if self.rounds is not None and self.rounds.holds_decode():
            return None
        if self.retention is not None:
            self.retention.compact_running_requests(batch)
        has_others = self.paused or self.partial_prefills() or self.rounds is not None
        if has_others and not self._make_room(batch):
            return None
        reqs = batch.reqs
        left = super().update_running_batch(batch)
        if self.rounds is not None and len(batch.reqs) < len(reqs):
            self._forget_ended(reqs, batch.reqs)
        return left

    def _forget_ended(self, before: list[Req], after: list[Req]) -> None:
        """Upstream ends a request that cannot fit into memory here, without a batch result."""
        assert self.rounds is not None
        stayed = {req.rid for req in after}
        for req in before:
            if req.rid not in stayed and req.to_finish is not None:
                self.rounds.table.remove(req.rid)

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        if self._progress is not None:
            is_prefill = batch.forward_mode.is_extend()
            prompts = (len(req.origin_input_ids) for req in batch.reqs) if is_prefill else ()
            self._progress.launch(sum(prompts))
        if self._fault_injection is not None:
            self._fault_injection.meet(req.origin_input_ids for req in batch.reqs)
        work = batch_times.launch_work(batch, self.rounds) if self.rounds is not None else None
        launched_s = time.monotonic()
        result = super().run_batch(batch, *args, **kwargs)
        if work is not None and self.meter is not None:
            batch_times.stamp_launch(result, Launch(work, launched_s), self.device_module)
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        if self.meter is not None:
            batch_times.book_arrival(result, self.meter)
        # With overlap a finished request is in one more batch.
        unfinished = {req.rid for req in batch.reqs if req.finished_reason is None}
        super().process_batch_result(batch, result)
        if self._progress is not None:
            self._progress.step()
        for req in batch.reqs:
            if req.finished_reason is None:
                continue
            if req.rid in unfinished:
                self.request_log.finished(req)
            if self.rounds is not None:
                self.rounds.table.remove(req.rid)
            if self.retention is not None and req.session is not None:
                self.retention.finished(req.session.session_id)

    # --- the queue ---

    def handle_generate_request(self, recv_req: Any, **kwargs: Any) -> Any:
        if self.retention is not None:
            self.retention.settle()
        return super().handle_generate_request(recv_req, **kwargs)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        is_promoted = self._follow_early_order(req)
        background = req.rid.startswith(TURN_PREFILL_PREFIX) and not is_promoted
        own = None
        if self.best_effort is not None:
            own = class_of(req, kv_by_tokens=self.kv_by_tokens)
        self._counts["retracted"] += is_retracted
        self.request_log.queued(req, is_retracted)
        if self.tier_events is not None:
            self.tier_events.request_queued(req)
        if self.rounds is not None:
            n_tokens, n_new = len(req.origin_input_ids), self._tokens_to_prefill(req)
            self.rounds.table.wait(
                req.rid,
                now_s=self.rounds.now_s,
                managed=req.rid.startswith(HEARD_PREFIXES) and not background,
                background=background,
                prompt_tokens=n_tokens,
                prefill_tokens=n_new,
                audio_s=batch_times.audio_s_of(req, max(0, n_tokens - n_new), n_tokens),
                best_effort=own,
            )
        super()._add_request_to_queue(req, is_retracted)
        if self.best_effort is not None and not self.enable_priority_scheduling:
            # Read by the radix tree alone (bridge/session/radix.py).
            is_spare = self.best_effort.owns(req)
            req.priority = PRIORITY if is_spare else PRIORITY_OF_OTHERS

    def _release_aborted_request(self, req: Req) -> None:
        self.request_log.aborted_in_queue(req)
        if self.rounds is not None:
            self.rounds.table.remove(req.rid)
        super()._release_aborted_request(req)
        sessions = getattr(self.tree_cache, "session", None)
        if req.retracted_stain and not req.finished() and isinstance(sessions, SessionCache):
            sessions.drop(req)

    # --- counts of live requests ---

    def _totals(self) -> dict[str, float]:
        own = self.sliced_prefill.totals if self.sliced_prefill is not None else {}
        return super()._totals() | {"paused_now": float(len(self.paused))} | own

    def collect_inflight_reqs(self) -> set[Req]:
        paused = {paused.req for paused in self.paused.values()}
        return super().collect_inflight_reqs() | paused | set(self._preempted_prefills())

    def abort_request(self, recv_req: Any) -> None:
        super().abort_request(recv_req)
        if self.sliced_prefill is not None:
            self.sliced_prefill.abort(recv_req.rid, recv_req.abort_all)

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        outside_batches = self.paused or self._preempted_prefills()
        return not outside_batches and super().is_fully_idle(for_health_check, ignore_waiting)

    def pause_generation(self, recv_req: Any) -> Any:
        # SGLang's pause with mode "retract" covers the running batch only.
        in_flight = {rid: p for rid, p in self.paused.items() if p.step_in_flight}
        back = [p for rid, p in self.paused.items() if rid not in in_flight]
        if recv_req.mode == "retract" and back:
            batch = decode_batch_of(self, back)
            self.paused = in_flight
            if self.running_batch.is_empty():
                self.running_batch = batch
            else:
                self.running_batch.merge_batch(batch)
        if recv_req.mode == "retract" and self.sliced_prefill is not None:
            for req in self._preempted_prefills():
                self.sliced_prefill.retract(req)
                self._retract(req, 0)
        return super().pause_generation(recv_req)

    def on_idle(self) -> Any:
        if self._progress is not None and (self.paused or self.is_fully_idle()):
            self._progress.step()  # an iteration that had nothing to run
        if self.is_fully_idle():
            if self.rounds is not None:
                self.rounds.table.keep_only(set())
            # The loop may sleep now, which would delay the report of the last events.
            self.report(at_once=True)
        if self._tiers_wait_s < _IDLE_SLEEP_S and self.running_batch.is_empty():
            self.maybe_send_health_check_signal()
            self._poll(self._tiers_wait_s)
            return None
        return super().on_idle()
