"""SGLang's scheduler, composed of parts: its loop, with hooks over which it folds.

In: decisions of the parts (part.py), which requests pause above all. Out: the batches that
SGLang's loop runs. With the policies off and no request blocked, every round is SGLang's own.
Used by the engines of thinker and talker; composition.py says which parts they have.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar, get_args

from sglang.srt.managers.io_struct import OpenSessionReqInput, OpenSessionReqOutput
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
from sglang.srt.server_args import PortArgs
from sglang.utils import TypeBasedDispatcher

from sglang_live.bridge.rounds import IDLE_WAIT_S
from sglang_live.bridge.scheduler.channel import Channel
from sglang_live.bridge.scheduler.composition import parts_of
from sglang_live.bridge.scheduler.memory import Memory
from sglang_live.bridge.scheduler.part import Part, Prefill, set_frozen
from sglang_live.bridge.scheduler.paused import ReqsView
from sglang_live.bridge.scheduler.pausing import Pausing
from sglang_live.messages import Feed

_IDLE_SLEEP_S = 1.0  # SGLang's own, in an engine without work

Kind = TypeVar("Kind", bound=Part)


class LiveScheduler(Scheduler):
    """
    Attributes:
        parts: in the order in which their hooks run.
        is_first_rank: whether SGLang sends requests to this rank.
    """

    chunked_prefill_size: int | None  # SGLang's
    running_batch: ScheduleBatch  # SGLang's
    max_req_len: int  # SGLang's
    max_req_input_len: int  # SGLang's
    max_total_num_tokens: int  # SGLang's
    pool_stats_observer: SchedulerPoolStatsObserver  # SGLang's

    # --- setting up, in SGLang's order ---

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        self.is_first_rank = self.ipc_channels.recv_from_tokenizer is not None
        self.parts = parts_of(self)
        self.channel = self.part(Channel)
        self.memory = self.part(Memory)
        self.pausing = self.part(Pausing)
        self._urgent = tuple(kind for part in self.parts for kind in part.urgent)

    def replace(self, old: Part, new: Part) -> None:
        """Have a part take the place of another."""
        self.parts = tuple(new if part is old else part for part in self.parts)

    def part(self, kind: type[Kind]) -> Kind:
        """The part of this class. Raises StopIteration if there is none."""
        return next(part for part in self.parts if isinstance(part, kind))

    def init_memory_pools(self) -> None:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.making_pools())
            super().init_memory_pools()

    def init_model_worker(self) -> None:
        super().init_model_worker()
        longest = self.memory.longest_request(self.max_total_num_tokens)
        self.max_req_len = min(self.max_req_len, longest)
        self.max_req_input_len = min(self.max_req_input_len, self.max_req_len - 5)

    def init_running_status(self) -> None:
        super().init_running_status()
        if not self.spec_algorithm.is_none() or self.attn_dp_enabled:
            raise RuntimeError("pausing requests excludes speculation and DP attention")
        for part in self.parts:
            part.start()

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        # A message to a part that is off changes nothing.
        handlers: dict[type, list[Callable[[Any], Any]]] = {kind: [] for kind in get_args(Feed)}
        for part in self.parts:
            for kind, handler in part.handlers().items():
                handlers.setdefault(kind, []).append(handler)
        self._request_dispatcher += TypeBasedDispatcher(
            [(kind, partial(_tell, own)) for kind, own in handlers.items()]
        )

    def init_pool_stats_observer(self) -> None:
        super().init_pool_stats_observer()
        for part in self.parts:
            self.pool_stats_observer = part.pool_stats(self.pool_stats_observer)

    def init_invariant_checker(self) -> None:
        super().init_invariant_checker()
        set_frozen(self.invariant_checker, "get_running_batch", self._holding_kv)

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        set_frozen(self.load_inquirer, "get_running_batch", self._running_and_outside)

    # --- facts that parts share ---

    def outside_batches(self) -> list[Req]:
        """Requests with KV that are in no batch, beside SGLang's half-prefilled one."""
        return [req for part in self.parts for req in part.outside_batches()]

    def _running_and_outside(self) -> ScheduleBatch | ReqsView:
        outside = self.outside_batches()
        return ReqsView([*self.running_batch.reqs, *outside]) if outside else self.running_batch

    def _holding_kv(self) -> ScheduleBatch | ReqsView:
        """As above, plus the half-prefilled prompt, which is in no batch in a decode round."""
        view = self._running_and_outside()
        chunked = self._chunked()
        return ReqsView([*view.reqs, *chunked]) if chunked else view

    def partial_prefills(self) -> list[Req]:
        """Prompts between two chunks."""
        preempted = [req for part in self.parts for req in part.half_prefilled()]
        return [*preempted, *self._chunked()]

    def _chunked(self) -> list[Req]:
        """SGLang's half-prefilled request, if there is one."""
        return [] if self.chunked_req is None else [self.chunked_req]

    def with_input(self) -> list[Req]:
        """The waiting requests that could be prefilled."""
        # Asked of every waiting request in every round: only the parts that have an answer.
        lacks = [p.lacks_input for p in self.parts if type(p).lacks_input is not Part.lacks_input]
        return [req for req in self.waiting_queue if not any(one(req) for one in lacks)]

    def may_requeue(self, req: Req) -> bool:
        """Whether a half-prefilled request may return to the queue, its KV to the tree."""
        return any(part.may_requeue(req) for part in self.parts)

    def room_comes(self, req: Req, running_batch: ScheduleBatch) -> bool:
        """Whether memory for the request is about to come, so that no other need lose its KV."""
        return any([part.room_comes(req, running_batch) for part in self.parts])

    def compacted(self, rid: str, n_tokens: int) -> None:
        for part in self.parts:
            part.compacted(rid, n_tokens)

    # --- input ---

    def _poll_timeout_aborts(self) -> list[Any]:
        # SGLang calls it on rank 0 only, and broadcasts the result with the round's requests.
        for part in self.parts:
            part.before_feeds()
        now_s = time.monotonic()
        feeds = [message for part in self.parts for message in part.feeds(now_s)]
        return [*feeds, *super()._poll_timeout_aborts()]

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        # SGLang appends what rank 0 decides to the requests.
        urgent = [req for req in recv_reqs if isinstance(req, self._urgent)]
        if urgent:
            recv_reqs = urgent + [req for req in recv_reqs if not isinstance(req, self._urgent)]
        super().process_input_requests(recv_reqs)

    def handle_generate_request(self, recv_req: Any, **kwargs: Any) -> Any:
        for part in self.parts:
            part.before_request()
        return super().handle_generate_request(recv_req, **kwargs)

    def open_session(self, recv_req: OpenSessionReqInput) -> OpenSessionReqOutput | None:
        for part in self.parts:
            part.before_session()
        return super().open_session(recv_req)

    def init_req_max_new_tokens(self, req: Req) -> None:
        own = n_tokens = self.max_total_num_tokens
        for part in self.parts:
            n_tokens = part.obtainable_tokens(n_tokens)
        self.max_total_num_tokens = n_tokens
        try:
            super().init_req_max_new_tokens(req)
        finally:
            self.max_total_num_tokens = own

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        for part in self.parts:
            part.queues(req, is_retracted)
        super()._add_request_to_queue(req, is_retracted)
        for part in self.parts:
            part.queued(req)

    # --- a round ---

    def get_next_batch_to_run(self, running_batch, last_batch) -> NextBatchPlan:
        for part in self.parts:
            part.before_round()
        self.channel.report(self.totals)
        if self.pausing.requests:
            running_batch = self.pausing.resume(running_batch)
        for part in self.parts:
            part.before_batch(running_batch)
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        for part in self.parts:
            part.planned(plan)
        if plan.batch_to_run is None and last_batch is None:
            is_held = not plan.running_batch.is_empty()
            if is_held or self._awaits_input():
                limits_s = [part.wait_limit_s() for part in self.parts]
                self.channel.wait(min(IDLE_WAIT_S, *limits_s))
        return plan

    def _awaits_input(self) -> bool:
        """Whether requests can go on after a message or some time, if no batch can run now."""
        if any(part.awaits_input() for part in self.parts):
            return True
        return bool(self.waiting_queue) and not self.with_input()

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        self.pausing.pause(running_batch)
        for part in self.parts:
            part.before_prefill(running_batch)
        prefill = Prefill(self.with_input(), running_batch.reqs)
        if len(prefill.queue) < len(self.waiting_queue):
            ready = set(prefill.queue)
            prefill.later = [req for req in self.waiting_queue if req not in ready]
        for part in self.parts:
            part.narrow(prefill)
        if prefill.budget == 0:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        plan = self._prefill(prefill, running_batch)
        if plan.batch_to_run is None:
            for part in self.parts:
                part.after_no_prefill(plan.running_batch)
        return plan

    def _prefill(self, prefill: Prefill, running_batch: ScheduleBatch) -> NextBatchPlan:
        """Run SGLang's prefill admission on what was chosen."""
        own_chunk = self.chunked_prefill_size
        if prefill.budget is not None and own_chunk:
            pages = max(1, prefill.budget // self.page_size)
            self.chunked_prefill_size = min(own_chunk, pages * self.page_size)
            n_tokens = map(self.memory.tokens_to_prefill, prefill.queue)
            prefill.narrow(*audio_within(prefill.budget, prefill.queue, n_tokens))
        later = prefill.later
        self.waiting_queue = prefill.queue
        try:
            plan = self._admit(running_batch)
            if plan.batch_to_run is None and any(p.resumes_prefill() for p in self.parts):
                later = self.waiting_queue + later
                self.waiting_queue = []
                plan = self._admit(plan.running_batch)
        finally:
            self.chunked_prefill_size = own_chunk
        self.waiting_queue.extend(later)
        if plan.batch_to_run is not None:
            for part in self.parts:
                part.launches_prefill(plan.batch_to_run.reqs)
        return plan

    def _admit(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        plan = super().get_new_batch_prefill(running_batch)
        if plan.batch_to_run is None and self.waiting_queue:
            for part in self.parts:
                part.finds_no_room(self.waiting_queue, plan.running_batch)
        return plan

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        self.pausing.pause(batch)  # rounds in which prefill was deferred
        if batch.is_empty():
            batch.batch_is_full = False
            return batch
        if any(part.holds_decode() for part in self.parts):
            return None
        for part in self.parts:
            part.before_decode(batch)
        if not self.memory.make_room(batch):
            return None
        before = batch.reqs
        left = super().update_running_batch(batch)
        for part in self.parts:
            part.after_decode(before, batch.reqs)
        return left

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        for part in self.parts:
            part.before_launch(batch)
        result = super().run_batch(batch, *args, **kwargs)
        for part in self.parts:
            part.launched(batch, result)
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        for part in self.parts:
            part.before_result(result)
        # With overlap a finished request is in one more batch.
        unfinished = {req.rid for req in batch.reqs if req.finished_reason is None}
        super().process_batch_result(batch, result)
        for part in self.parts:
            part.after_result()
        for req in batch.reqs:
            if req.finished_reason is not None:
                for part in self.parts:
                    part.ended(req, req.rid in unfinished)

    def on_idle(self) -> Any:
        is_fully_idle = self.is_fully_idle()
        for part in self.parts:
            part.idle(is_fully_idle)
        if is_fully_idle:
            # The loop may sleep now, which would delay the report of the last events.
            self.channel.report(self.totals, at_once=True)
        limit_s = min(part.idle_limit_s() for part in self.parts)
        if limit_s < _IDLE_SLEEP_S and self.running_batch.is_empty():
            self.maybe_send_health_check_signal()
            self.channel.wait(limit_s)
            return None
        return super().on_idle()

    # --- ends of requests, and counts of live ones ---

    def abort_request(self, recv_req: Any) -> None:
        super().abort_request(recv_req)
        for part in self.parts:
            part.abort(recv_req.rid, recv_req.abort_all)

    def _release_aborted_request(self, req: Req) -> None:
        super()._release_aborted_request(req)
        for part in self.parts:
            part.aborted(req)

    def pause_generation(self, recv_req: Any) -> Any:
        if recv_req.mode == "retract":
            for part in self.parts:
                part.before_retract_all()
        return super().pause_generation(recv_req)

    def collect_inflight_reqs(self) -> set[Req]:
        return super().collect_inflight_reqs() | set(self.outside_batches())

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        if self.outside_batches():
            return False
        return super().is_fully_idle(for_health_check, ignore_waiting)

    def totals(self) -> dict[str, float]:
        """Of all parts, for the stage's report."""
        return {name: n for part in self.parts for name, n in part.totals().items()}


def _tell(handlers: list[Callable[[Any], Any]], message: Any) -> None:
    for handler in handlers:
        handler(message)


def audio_within(
    budget: int, queue: list[Req], n_tokens: Iterable[int]
) -> tuple[list[Req], list[Req]]:
    """Split the queue so that the prompts with audio in the first part fit into the budget whole.

    Upstream encodes all audio of a prompt at once, however small its first chunk. The first prompt
    with audio is in the first part even if it exceeds the budget.
    """
    n_sum, has_audio = 0, False
    for at, (req, n) in enumerate(zip(queue, n_tokens, strict=True)):
        n_sum += n
        if req.multimodal_inputs is None:
            continue
        if has_audio and n_sum > budget:
            return queue[:at], queue[at:]
        has_audio = True
    return queue, []
