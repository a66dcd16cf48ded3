"""Prompts that are prefilled in slices, and that shorter prompts may preempt between two slices.

SGLang continues one half-prefilled prompt until it is complete. Here it may be preempted with row,
KV and tree lock kept, as between any two chunks, and resumed later: nothing is computed twice. The
memory that it still needs stays reserved, so that two such prompts cannot fill the pool.
Owner: one Slicing per scheduler; equal on all ranks: it decides by broadcast facts only.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import Req

from sglang_live.bridge.rounds import FIRST_TOKENS, Rounds
from sglang_live.bridge.scheduler.memory import decode_tokens_left, prefill_tokens_left
from sglang_live.bridge.scheduler.part import Part, Prefill
from sglang_live.policy.sliced_prefill import is_long, passing, rank_s, slice_tokens

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler


class Slicing(Part):
    """The half-prefilled prompts of a scheduler.

    Attributes:
        preempted: half-prefilled prompts other than the scheduler's chunked_req, by request id.
    """

    def __init__(self, scheduler: "LiveScheduler", rounds: Rounds):
        super().__init__(scheduler)
        self._rounds = rounds
        self.preempted: dict[str, Req] = {}
        self._begun_s: dict[str, float] = {}
        self._sliced_s: dict[str, float] = {}
        self._decodes_next = False
        self._counts = dict.fromkeys(("prefills_preempted", "prefills_retracted"), 0.0)

    def totals(self) -> dict[str, float]:
        return self._counts

    def outside_batches(self) -> Iterable[Req]:
        return self.preempted.values()

    def half_prefilled(self) -> Iterable[Req]:
        return self.preempted.values()

    def cannot_step(self) -> Iterable[str]:
        return [req.rid for req in self._scheduler.partial_prefills()]

    # --- a round ---

    def narrow(self, prefill: Prefill) -> None:
        if prefill.budget == 0:
            return
        chosen = self.choose(prefill.queue, prefill.running)
        if chosen is None:
            prefill.at_most(0)
            return
        queue, others, most = chosen
        prefill.narrow(queue, others)
        if most is not None:
            prefill.at_most(most)

    def choose(
        self, queue: list[Req], running: list[Req]
    ) -> tuple[list[Req], list[Req], int | None] | None:
        """Choose the prompts of this round's prefill, and set the scheduler's chunked_req.

        Returns:
            the requests of the queue that may be admitted, the others, and the tokens of the
            prefill (None: no further limit). None if decoding takes precedence over prefill.
        """
        config = self._rounds.config.slicing
        most = slice_tokens(self._rounds.rates, self._rounds.config.stage, config)
        half, waiting = self._scheduler.partial_prefills(), self._sizes(queue)
        if not half:
            is_any_long = any(is_long(tokens, most, config) for tokens, _ in waiting)
            return queue, [], most if is_any_long else None
        first = self._first(half)
        idle_s = self._rounds.now_s - self._sliced_s.get(first.rid, self._rounds.now_s)
        free = self._free(half, running)
        passed = passing(
            prefill_tokens_left(first), waiting, idle_s=idle_s, free=free, most=most, config=config
        )
        if passed:
            self._preempt()
            others = [req for index, req in enumerate(queue) if index not in set(passed)]
            # A shorter prompt may still be long enough to be sliced.
            sizes = [waiting[index][0] for index in passed]
            is_any_long = any(is_long(tokens, most, config) for tokens in sizes)
            return [queue[index] for index in passed], others, most if is_any_long else None
        if self._decodes_go_first(running, idle_s) or not self._has_room(first, most, running):
            self._decodes_next = False
            return None
        self._resume(first)
        # With other prompts preempted, only passing() admits requests: it checks their memory.
        return ([], queue, most) if self.preempted else (queue, [], most)

    def resumes_prefill(self) -> bool:
        if self._scheduler.chunked_req is not None or not self.preempted:
            return False
        self._resume(self._first(self._scheduler.partial_prefills()))
        return True

    def launches_prefill(self, reqs: list[Req]) -> None:
        half, now_s = {req.rid for req in self._scheduler.partial_prefills()}, self._rounds.now_s
        ran = {req.rid for req in reqs} & half
        self._begun_s = {rid: self._begun_s.get(rid, now_s) for rid in half}
        self._sliced_s = {rid: now_s if rid in ran else self._sliced_s[rid] for rid in half}
        self._decodes_next = bool(ran)

    def _first(self, half: list[Req]) -> Req:
        rates, config, now_s = self._rounds.rates, self._rounds.config.slicing, self._rounds.now_s

        def rank(req: Req) -> tuple[float, str]:
            begun_s = self._begun_s.get(req.rid, now_s)
            return rank_s(begun_s, prefill_tokens_left(req), rates, config), req.rid

        return min(half, key=rank)

    def _sizes(self, queue: list[Req]) -> list[tuple[int, int]]:
        """For each request, its tokens to compute and the tokens that it will hold at its end."""
        page_size = self._scheduler.page_size
        found = []
        for req in queue:
            tokens = self._scheduler.memory.tokens_to_prefill(req)
            held = self._scheduler.memory.tokens_to_hold(req)
            found.append((tokens, held + decode_tokens_left(req) + page_size))
        return found

    def _free(self, half: list[Req], running: list[Req]) -> int:
        page_size = self._scheduler.page_size
        reserved = sum(
            prefill_tokens_left(req) + decode_tokens_left(req) + page_size for req in half
        )
        # Best effort is retracted for others.
        promised = sum(decode_tokens_left(req) for req in running if self._keeps(req))
        return self._scheduler.memory.state().free - reserved - promised

    def _keeps(self, req: Req) -> bool:
        return not self._rounds.table.is_best_effort(req.rid)

    def _decodes_go_first(self, running: list[Req], idle_s: float) -> bool:
        running = [req for req in running if self._keeps(req)]
        max_preempt_s = self._rounds.config.slicing.max_preempt_s
        if idle_s < max_preempt_s and any(map(_is_before_first_sound, running)):
            return True
        # SGLang prefers prefill in every round: no request would decode until it is complete.
        rids = [req.rid for req in running if not req.finished()]
        return self._decodes_next and any(not self._rounds.is_well_buffered(rid) for rid in rids)

    def _has_room(self, first: Req, most: int, running: list[Req]) -> bool:
        """Whether a slice fits: running requests may exceed the memory expected at its start."""
        needed = min(prefill_tokens_left(first), most) + 2 * self._scheduler.page_size
        if self._scheduler.memory.state().free >= needed:
            return True
        # Running requests end or are retracted. With none running, upstream handles the shortage.
        return not any(not req.finished() for req in running)

    # --- preempt, resume, retract ---

    def _resume(self, req: Req) -> None:
        """Make it the scheduler's chunked_req."""
        if self._scheduler.chunked_req is not req:
            self._preempt()
            self._scheduler.chunked_req = self.preempted.pop(req.rid)

    def _preempt(self) -> None:
        req = self._scheduler.chunked_req
        if req is not None:
            self.preempted[req.rid] = req
            self._scheduler.chunked_req = None
            self._counts["prefills_preempted"] += 1

    def removes_prefill(self, req: Req, *, retracts: bool) -> bool:
        if self._scheduler.chunked_req is req:
            self._scheduler.chunked_req = None
        else:
            del self.preempted[req.rid]
        self._counts["prefills_retracted"] += retracts
        return True

    def before_retract_all(self) -> None:
        for req in list(self.preempted.values()):
            self.removes_prefill(req, retracts=True)
            self._scheduler.memory.retract(req, 0)

    def abort(self, rid: str, every: bool) -> None:
        """Abort preempted prompts as SGLang aborts a half-prefilled one between two chunks."""
        scheduler = self._scheduler
        for req in [r for r in self.preempted.values() if every or r.rid.startswith(rid)]:
            current, pending = scheduler.chunked_req, scheduler._pending_chunked_abort_req
            scheduler.chunked_req = scheduler._pending_chunked_abort_req = req
            del self.preempted[req.rid]
            scheduler.process_pending_chunked_abort()
            scheduler.chunked_req = current
            scheduler._pending_chunked_abort_req = pending


def _is_before_first_sound(req: Req) -> bool:
    first = min(FIRST_TOKENS, req.sampling_params.max_new_tokens)
    return not req.finished() and len(req.output_ids) < first
