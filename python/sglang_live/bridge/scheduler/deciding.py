"""The policies' decisions in a scheduler: which requests step, pause, begin and are retracted.

In: facts of the scheduler, the consumers' progress. Out: decisions of bridge/rounds.py.
Owner: one Deciding per scheduler whose policies decide about rounds; equal on all ranks.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch

from sglang_live.bridge.batch_work import Launch
from sglang_live.bridge.rate_meter import RateMeter
from sglang_live.bridge.round_facts import Pool, RoundStamp
from sglang_live.bridge.rounds import Rounds
from sglang_live.bridge.scheduler import batch_times
from sglang_live.bridge.scheduler.best_effort import class_of
from sglang_live.bridge.scheduler.part import Part, Prefill
from sglang_live.ids import HEARD_PREFIXES, TURN_PREFILL_PREFIX
from sglang_live.messages import HeardOfMany, Promote

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler

# Promotions that are kept until their request arrives: they come on another socket and may be
# first.
_MAX_EARLY = 4096


class Deciding(Part):
    """
    Args:
        kv_by_tokens: whether a request's token ids determine its KV.
    Attributes:
        launch: the batch that is being launched; None: it computes nothing that is measured.
    """

    def __init__(self, scheduler: "LiveScheduler", rounds: Rounds, *, kv_by_tokens: bool):
        super().__init__(scheduler)
        self.rounds = rounds
        self._kv_by_tokens = kv_by_tokens
        self._waiting: list[Req] = []
        self.launch: Launch | None = None
        self._promoted: OrderedDict[str, bool] = OrderedDict()

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            RoundStamp: self.rounds.stamp,
            HeardOfMany: self.rounds.progress,
            Promote: self._on_promote,
        }

    # --- a round ---

    def before_round(self) -> None:
        scheduler = self._scheduler
        partial = scheduler.partial_prefills()
        half = [req.rid for req in partial if scheduler.may_requeue(req)]
        self.rounds.decide(
            scheduler.memory.state(),
            prefill_running=len(partial) > len(half),
            blocked=[rid for part in scheduler.parts for rid in part.cannot_step()],
            half=half,
        )

    def narrow(self, prefill: Prefill) -> None:
        queue, later = self.rounds.admission_order(prefill.queue)
        self._waiting = [*queue, *later]
        prefill.narrow(queue, later)
        budget = self.rounds.prefill_budget()
        if budget is None:
            return
        prefill.at_most(budget)
        # Upstream has stored a half-prefilled prompt's last chunk already.
        has_any = self._scheduler.waiting_queue or self._scheduler.chunked_req is not None
        if budget == 0 and has_any:
            self.rounds.totals["prefill_put_off"] += 1

    def launches_prefill(self, reqs: list[Req]) -> None:
        for req in reqs:
            self.rounds.table.admit(req.rid, self.rounds.now_s)

    def after_no_prefill(self, running_batch: ScheduleBatch) -> None:
        """Retract one request that has time, if memory is short for the first urgent one of the
        waiting requests and none was admitted. It would otherwise hold its KV until its buffer is
        played. Running requests are retracted only where a listener waits.
        """
        scheduler, memory = self._scheduler, self._scheduler.memory
        if not self._waiting or scheduler.room_comes(self._waiting[0], running_batch):
            return
        if not scheduler.req_to_token_pool.available_size():
            return
        urgent = next((r for r in self._waiting if not self.rounds.is_well_buffered(r.rid)), None)
        pool = memory.state()
        if urgent is None or memory.fits(urgent, running_batch.reqs, pool.free):
            return
        is_heard = self.rounds.table.is_managed(urgent.rid)
        for rid in self.rounds.spare(pool):
            may_retract = is_heard or rid in scheduler.pausing.requests
            if may_retract and memory.retract_one(rid, running_batch):
                running_batch.batch_is_full = False
                return

    def after_decode(self, before: list[Req], after: list[Req]) -> None:
        """Upstream ends a request that cannot fit into memory here, without a batch result."""
        if len(after) < len(before):
            stayed = {req.rid for req in after}
            for req in before:
                if req.rid not in stayed and req.to_finish is not None:
                    self.rounds.table.remove(req.rid)

    def planned(self, plan: NextBatchPlan) -> None:
        if events := self.rounds.take_events():
            self._scheduler.channel.send(events)

    def before_launch(self, batch: ScheduleBatch) -> None:
        work = batch_times.launch_work(batch, self.rounds)
        self.launch = None if work is None else Launch(work, time.monotonic())

    def wait_limit_s(self) -> float:
        return self.rounds.wait_limit_s()

    def deadline_s(self) -> float:
        return self.rounds.deadline_s()

    def awaits_input(self) -> bool:
        return self.rounds.prefill_budget() == 0

    def idle(self, fully: bool) -> None:
        if fully:
            self.rounds.table.keep_only(set())

    # --- requests ---

    def _on_promote(self, promote: Promote) -> None:
        if promote.to in self.rounds.table:
            self.rounds.table.to_foreground(promote.to)
            return
        self._promoted[promote.to] = True
        while len(self._promoted) > _MAX_EARLY:
            self._promoted.popitem(last=False)

    def queues(self, req: Req, is_retracted: bool) -> None:
        n_tokens = len(req.origin_input_ids)
        n_new = self._scheduler.memory.tokens_to_prefill(req)
        background = req.rid.startswith(TURN_PREFILL_PREFIX)
        if self._promoted.pop(req.rid, False):
            background = False
        tells = self.rounds.tells_best_effort
        self.rounds.table.wait(
            req.rid,
            now_s=self.rounds.now_s,
            managed=req.rid.startswith(HEARD_PREFIXES) and not background,
            background=background,
            prompt_tokens=n_tokens,
            prefill_tokens=n_new,
            audio_s=batch_times.audio_s_of(req, max(0, n_tokens - n_new), n_tokens),
            best_effort=class_of(req, kv_by_tokens=self._kv_by_tokens) if tells else None,
        )

    def may_pause(self) -> bool:
        return self.rounds.pauses_any()

    def pauses(self, req: Req) -> bool:
        return self.rounds.pause(req.rid)

    def paused(self, req: Req) -> None:
        self.rounds.paused(req.rid)

    def resumed(self, rid: str) -> None:
        self.rounds.resumed(rid)

    def compacted(self, rid: str, n_tokens: int) -> None:
        self.rounds.table.compacted(rid, n_tokens)

    def ended(self, req: Req, first: bool) -> None:
        self.rounds.table.remove(req.rid)

    def aborted(self, req: Req) -> None:
        self.rounds.table.remove(req.rid)

    def retraction_order(
        self, pool: Pool, blocked: list[str]
    ) -> tuple[list[str], list[str]] | None:
        return self.rounds.retraction_order(pool, blocked)

    def totals(self) -> dict[str, float]:
        return self.rounds.report()


class Measuring(Part):
    """Rank 0's clock and measurements, by which all ranks decide."""

    def __init__(self, scheduler: "LiveScheduler", deciding: Deciding):
        super().__init__(scheduler)
        self._deciding = deciding
        self._meter = RateMeter(predicts=deciding.rounds.tells_best_effort)

    def feeds(self, now_s: float) -> list[Any]:
        return [
            RoundStamp(
                now_s,
                rates=self._meter.rates(now_s),
                n_done=self._meter.n_done,
                prefill_done_s=self._meter.prefill_done_s,
                cost=self._meter.cost,
            )
        ]

    def launched(self, batch: ScheduleBatch, result: Any) -> None:
        if self._deciding.launch is not None:
            device = self._scheduler.device_module
            batch_times.stamp_launch(result, self._deciding.launch, device)

    def before_result(self, result: Any) -> None:
        batch_times.book_arrival(result, self._meter)
