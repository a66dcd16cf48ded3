"""SGLang's scheduler with a listener in mind: streams may sit out rounds and come back.

In: decisions of bridge/rounds.py. Out: what SGLang's loop runs. Without policies and with nobody
to sit out, every round is SGLang's own. Subclassed by the talker's scheduler; the thinker's engine
runs it as it is.
"""

from collections.abc import Iterable

from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch

from sglang_live.bridge.scheduler.fault_injection import FaultInjection
from sglang_live.bridge.scheduler.memory import MemoryScheduler
from sglang_live.bridge.scheduler.paused import PausedRequest, ReqsView, decode_batch_of
from sglang_live.bridge.scheduler.progress import ProgressCell
from sglang_live.engine_channel.messages import SPEAK_PREFIX, THINK_PREFIX, TURN_PREFILL_PREFIX
from sglang_live.policy.config import THINKER

# How long a round may wait for input when every stream sits out. Messages end the wait at once.
IDLE_WAIT_MS = 20


class LiveScheduler(MemoryScheduler):
    policy_config = THINKER

    # --- setting up ---

    def init_running_status(self) -> None:
        super().init_running_status()
        if not self.spec_algorithm.is_none() or self.server_args.enable_dp_attention:
            raise RuntimeError("live streams need SGLang without speculation and DP attention")
        self._progress = ProgressCell.from_env() if self.outbox is not None else None
        self._fault_injection = FaultInjection.from_env() if self.policy_config is THINKER else None

    def init_pool_stats_observer(self) -> None:
        super().init_pool_stats_observer()
        self._observe(self.pool_stats_observer, self._holding_kv)

    def init_invariant_checker(self) -> None:
        super().init_invariant_checker()
        self._observe(self.invariant_checker, self._holding_kv)

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        self._observe(self.load_inquirer, self._running_and_paused)

    def _observe(self, observer, reqs_view) -> None:
        # Frozen dataclasses: what they observe is fixed at construction, but for this.
        object.__setattr__(observer, "get_running_batch", reqs_view)

    def _running_and_paused(self):
        if not self.paused and not self._preempted_prefills():
            return self.running_batch
        paused = [h.req for h in self.paused.values()]
        return ReqsView([*self.running_batch.reqs, *paused, *self._preempted_prefills()])

    def _holding_kv(self):
        """As above, and the half-prefilled prompt: in a decode round it is in no batch."""
        view = self._running_and_paused()
        return view if self.chunked_req is None else ReqsView([*view.reqs, self.chunked_req])

    # --- who sits out ---

    def _blocked(self, req: Req) -> bool:
        """Whether the model cannot run the request's next step yet."""
        return False

    def _any_gated(self) -> bool:
        """Whether some request may be gated: spares looking at each."""
        return False

    def _pause(self, req: Req) -> bool:
        if req.finished() or req.to_finish is not None or _must_end(req):
            return False
        return self._blocked(req) or (self.rounds is not None and self.rounds.pause(req.rid))

    def _hold(self, batch: ScheduleBatch) -> None:
        if not self._any_gated() and (self.rounds is None or not self.rounds.anyone_leaves()):
            return
        pause = [self._pause(req) for req in batch.reqs]
        if not any(pause):
            return
        for index, out in enumerate(pause):
            if out:
                paused = PausedRequest.of(batch, index)
                self.paused[paused.req.rid] = paused
                if self.rounds is not None and not self._blocked(paused.req):
                    self.rounds.paused(paused.req.rid)
        batch.filter_batch(keep_indices=[i for i, out in enumerate(pause) if not out])
        batch.batch_is_full = False

    def _resume(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        back = []
        for paused in [h for h in self.paused.values() if not self._pause(h.req)]:
            if not paused.req.finished():
                if paused.step_in_flight:
                    continue
                back.append(paused)
            # With overlap it may have ended in the step that was in flight when it was held.
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
                r for r, h in self.paused.items() if h.step_in_flight or self._blocked(h.req)
            ]
            partial_prefills = self.partial_prefills()
            if self.sliced_prefill is not None:
                blocked += [req.rid for req in partial_prefills]
            self.rounds.decide(
                self._pool(), prefill_running=bool(partial_prefills), blocked=blocked
            )
            if self.device_peers is not None:
                self.device_peers.tell(self.rounds.urgent, self.rounds.now_s)
        if self._reports:
            self.report()
        if self.paused:
            running_batch = self._resume(running_batch)
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        if self.rounds is not None and (notes := self.rounds.take_notes()) and self.outbox:
            self.outbox.send(notes)
        if plan.batch_to_run is None and self.paused and last_batch is None:
            self._wait_for_news()
        return plan

    def _wait_for_news(self) -> None:
        limit_s = IDLE_WAIT_MS / 1000
        if self.rounds is not None:
            limit_s = min(limit_s, self.rounds.wait_limit_s())
        self._news.poll(max(1, round(1000 * limit_s)))

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        self._hold(running_batch)
        if running_batch.is_empty():
            # Upstream looks again when a request ends. Nothing runs, and memory may still have
            # come free: of a session that was closed, or whose caller said nothing after all.
            running_batch.batch_is_full = False
        queue, later = self._admission_order(self.waiting_queue)
        if self.retention is not None:
            queue, coming = self.retention.ready(queue)
            later = coming + later
        budget = self.rounds.prefill_budget() if self.rounds is not None else None
        if budget == 0:
            # A prefill that is half-way is parked: upstream stashed its last chunk already.
            if self.waiting_queue or self.chunked_req is not None:
                self.rounds.totals["prefill_put_off"] += 1
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        if self.sliced_prefill is not None:
            chosen = self.sliced_prefill.choose(queue, running_batch.reqs)
            if chosen is None:
                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
            queue, others, most = chosen
            later = others + later
            budget = min((n for n in (budget, most) if n is not None), default=None)
        return self._prefill(queue, later, budget, running_batch)

    def _prefill(
        self, queue: list[Req], later: list[Req], budget: int | None, running_batch: ScheduleBatch
    ) -> NextBatchPlan:
        """budget: tokens; None: the engine's own chunk. later: stay in the queue."""
        own_chunk = self.chunked_prefill_size
        if budget is not None and own_chunk:
            pages = max(1, budget // self.page_size)
            self.chunked_prefill_size = min(own_chunk, pages * self.page_size)
            n_tokens = map(self._tokens_to_prefill, queue)
            queue, beyond = heard_within(budget, queue, n_tokens)
            later = beyond + later
        self.waiting_queue = queue
        try:
            plan = super().get_new_batch_prefill(running_batch)
            if (
                plan.batch_to_run is None
                and self.chunked_req is None
                and self._preempted_prefills()
            ):
                self.sliced_prefill.go_on()  # those that were to pass do not fit after all
                later, self.waiting_queue = self.waiting_queue + later, []
                plan = super().get_new_batch_prefill(plan.running_batch)
        finally:
            self.chunked_prefill_size = own_chunk
        self.waiting_queue.extend(later)
        if self.rounds is not None and plan.batch_to_run is not None:
            self._launched(plan.batch_to_run.reqs)
        elif self.rounds is not None and self.paused:
            self._give_way_to(queue, plan.running_batch)
        return plan

    def _launched(self, reqs: list[Req]) -> None:
        if self.sliced_prefill is not None:
            self.sliced_prefill.launched(reqs)
        for req in reqs:
            self.rounds.table.admit(req.rid, self.rounds.now_s)

    def _admission_order(self, waiting: list[Req]) -> tuple[list[Req], list[Req]]:
        """The queue as it is tried in this round, and those that wait for another one."""
        if self.rounds is None:
            return waiting, []
        return self.rounds.admission_order(waiting)

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        self._hold(batch)  # rounds in which prefill was deferred
        if batch.is_empty():
            batch.batch_is_full = False
            return batch
        if self.retention is not None:
            self.retention.bound_running(batch)
        if self.paused or self.partial_prefills():
            self._make_room(batch)
        reqs = batch.reqs
        left = super().update_running_batch(batch)
        if self.rounds is not None and len(batch.reqs) < len(reqs):
            self._forget_ended(reqs, batch.reqs)
        return left

    def _forget_ended(self, before: list[Req], after: list[Req]) -> None:
        """Upstream ends a request that fits nowhere here, and no result of it will come."""
        stayed = {req.rid for req in after}
        for req in before:
            if req.rid not in stayed and req.to_finish is not None:
                self.rounds.table.leave(req.rid)

    def run_batch(self, batch: ScheduleBatch, *args, **kwargs):
        if self._progress is not None:
            is_prefill = batch.forward_mode.is_extend()
            prompts = (len(req.origin_input_ids) for req in batch.reqs) if is_prefill else ()
            self._progress.launch(sum(prompts))
        if self._fault_injection is not None:
            self._fault_injection.meet(req.origin_input_ids for req in batch.reqs)
        if self.rounds is not None:
            if batch.forward_mode.is_decode():
                self.rounds.ran_decode(batch.reqs)
            elif batch.forward_mode.is_extend():
                self.rounds.ran_prefill(batch.extend_num_tokens)
        return super().run_batch(batch, *args, **kwargs)

    def process_batch_result(self, batch: ScheduleBatch, result):
        super().process_batch_result(batch, result)
        if self._progress is not None:
            self._progress.step()
        for req in batch.reqs:
            if req.finished_reason is None:
                continue
            self.request_log.finished(req)
            if self.rounds is not None:
                self.rounds.table.leave(req.rid)
            if self.retention is not None and req.session is not None:
                self.retention.finished(req.session.session_id)

    # --- the queue ---

    def handle_generate_request(self, recv_req, **kwargs):
        if self.retention is not None:
            self.retention.settle()
        return super().handle_generate_request(recv_req, **kwargs)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        hurries = self._end_if_told(req)
        self._counts["retracted"] += is_retracted
        self.request_log.queued(req, is_retracted)
        if self.retention is not None:
            self.retention.arrives(req)
        if self.rounds is not None:
            self.rounds.table.wait(
                req.rid,
                now_s=self.rounds.now_s,
                managed=req.rid.startswith((SPEAK_PREFIX, THINK_PREFIX)),
                background=req.rid.startswith(TURN_PREFILL_PREFIX) and not hurries,
                prompt_tokens=len(req.origin_input_ids),
                prefill_tokens=self._tokens_to_prefill(req),
            )
        super()._add_request_to_queue(req, is_retracted)

    def _release_aborted_request(self, req: Req) -> None:
        if self.rounds is not None:
            self.rounds.table.leave(req.rid)
        super()._release_aborted_request(req)

    # --- everybody who counts live requests ---

    def _totals(self) -> dict[str, float]:
        own = self.sliced_prefill.totals if self.sliced_prefill is not None else {}
        return super()._totals() | {"paused_now": float(len(self.paused))} | own

    def collect_inflight_reqs(self) -> set[Req]:
        paused = {paused.req for paused in self.paused.values()}
        return super().collect_inflight_reqs() | paused | set(self._preempted_prefills())

    def abort_request(self, recv_req):
        super().abort_request(recv_req)
        if self.sliced_prefill is not None:
            self.sliced_prefill.abort(recv_req.rid, recv_req.abort_all)

    def is_fully_idle(self, for_health_check=False, ignore_waiting=False) -> bool:
        apart = self.paused or self._preempted_prefills()
        return not apart and super().is_fully_idle(for_health_check, ignore_waiting)

    def pause_generation(self, recv_req):
        # A pause that retracts looks at the running batch only.
        still_out = {rid: h for rid, h in self.paused.items() if h.step_in_flight}
        back = [h for rid, h in self.paused.items() if rid not in still_out]
        if recv_req.mode == "retract" and back:
            batch = decode_batch_of(self, back)
            self.paused = still_out
            if self.running_batch.is_empty():
                self.running_batch = batch
            else:
                self.running_batch.merge_batch(batch)
        if recv_req.mode == "retract" and self.sliced_prefill is not None:
            for req in self._preempted_prefills():
                self.sliced_prefill.leave(req)
                self._retract(req, 0)
        return super().pause_generation(recv_req)

    def on_idle(self):
        if self._progress is not None and (self.paused or self.is_fully_idle()):
            self._progress.step()  # rightly nothing was run
        if self.is_fully_idle():
            if self.rounds is not None:
                self.rounds.table.keep_only(set())
            # The loop may sleep now: what happened last would stay unsaid.
            self.report(at_once=True)
        return super().on_idle()


def heard_within(
    budget: int, queue: list[Req], n_tokens: Iterable[int]
) -> tuple[list[Req], list[Req]]:
    """The first of the queue, such that prompts with audio fit into the budget whole, and the rest.

    Upstream encodes all audio of a prompt at once, however small the first chunk of it. One such
    prompt is always among the first.
    """
    n_sum, has_heard = 0, False
    for at, (req, n) in enumerate(zip(queue, n_tokens, strict=True)):
        n_sum += n
        if req.multimodal_inputs is None:
            continue
        if has_heard and n_sum > budget:
            return queue[:at], queue[at:]
        has_heard = True
    return queue, []


def _must_end(req: Req) -> bool:
    return len(req.output_ids) >= req.sampling_params.max_new_tokens
