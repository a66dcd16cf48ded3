"""Prompts that are prefilled in slices, and wait between two of them for shorter ones.

SGLang goes on with one half-prefilled prompt until it is complete. Here it may leave its place
with row, KV and tree lock kept, as it is between any two chunks, and take it again later: nothing
is computed twice. What it still needs stays reserved, so that no two such prompts fill the pool.
Owner: one SlicedPrefill per scheduler; equal on all ranks, because it decides by what is broadcast.
"""

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_live.policy.sliced_prefill import is_long, passing, rank_s, slice_tokens

# Tokens of an answer before its first sound, with room: a chunk of the talker's takes four.
_FIRST_TOKENS = 16


class SlicedPrefill:
    """waiting: put back, by request id."""

    def __init__(self, scheduler):
        self._scheduler, self._rounds = scheduler, scheduler.rounds
        self.waiting: dict[str, Req] = {}
        self._begun_s: dict[str, float] = {}
        self._sliced_s: dict[str, float] = {}
        self._decodes_next = False
        self.totals = dict.fromkeys(("prefills_preempted", "prefills_retracted"), 0.0)

    def partial_prefills(self) -> list[Req]:
        current = self._scheduler.chunked_req
        return [*self.waiting.values(), *([] if current is None else [current])]

    # --- a round ---

    def choose(
        self, queue: list[Req], running: list[Req]
    ) -> tuple[list[Req], list[Req], int | None] | None:
        """Who prefills in this round: sets the scheduler's chunked_req.

        Returns:
            of the queue those that may be admitted now, the others, and tokens for all of them
            (None: as many as otherwise). None: no prefill, because decodes need the round.
        """
        rates, config = self._rounds.rates, self._rounds.config
        most = slice_tokens(rates, config)
        half, waiting = self.partial_prefills(), self._sizes(queue)
        if not half:
            is_any_long = any(is_long(tokens, rates, config) for tokens, _ in waiting)
            return queue, [], most if is_any_long else None
        first = self._first(half)
        idle_s = self._rounds.now_s - self._sliced_s.get(first.rid, self._rounds.now_s)
        free = self._free(half, running)
        passed = passing(
            prefill_tokens_left(first), waiting, idle_s=idle_s, free=free, most=most, config=config
        )
        if passed:
            self._park()
            others = [req for index, req in enumerate(queue) if index not in set(passed)]
            # A prompt that is shorter may be long all the same.
            sizes = [waiting[index][0] for index in passed]
            is_any_long = any(is_long(tokens, rates, config) for tokens in sizes)
            return [queue[index] for index in passed], others, most if is_any_long else None
        if self._decodes_go_first(running, idle_s) or not self._has_room(first, most, running):
            self._decodes_next = False
            return None
        self._go_on(first)
        # With other prompts put back, a request is admitted only after its memory was checked.
        return ([], queue, most) if self.waiting else (queue, [], most)

    def go_on(self) -> None:
        """Those that were to pass do not fit after all."""
        self._go_on(self._first(self.partial_prefills()))

    def launched(self, reqs: list[Req]) -> None:
        """A prefill of these was launched."""
        half, now_s = {req.rid for req in self.partial_prefills()}, self._rounds.now_s
        ran = {req.rid for req in reqs} & half
        self._begun_s = {rid: self._begun_s.get(rid, now_s) for rid in half}
        self._sliced_s = {rid: now_s if rid in ran else self._sliced_s[rid] for rid in half}
        self._decodes_next = bool(ran)

    def _first(self, half: list[Req]) -> Req:
        rates, config, now_s = self._rounds.rates, self._rounds.config, self._rounds.now_s

        def rank(req: Req) -> tuple[float, str]:
            begun_s = self._begun_s.get(req.rid, now_s)
            return rank_s(begun_s, prefill_tokens_left(req), rates, config), req.rid

        return min(half, key=rank)

    def _sizes(self, queue: list[Req]) -> list[tuple[int, int]]:
        """Of each, tokens to compute and to hold in the end."""
        page_size = self._scheduler.page_size
        found = []
        for req in queue:
            tokens = self._scheduler._tokens_to_prefill(req)
            found.append((tokens, tokens + reply_tokens_left(req) + page_size))
        return found

    def _free(self, half: list[Req], running: list[Req]) -> int:
        page_size = self._scheduler.page_size
        reserved = sum(
            prefill_tokens_left(req) + reply_tokens_left(req) + page_size for req in half
        )
        return self._scheduler._pool().free - reserved - sum(map(reply_tokens_left, running))

    def _decodes_go_first(self, running: list[Req], idle_s: float) -> bool:
        if idle_s < self._rounds.config.max_preempt_s and any(map(_begins, running)):
            return True
        # SGLang prefers a prefill in every round: answers would stand still until it is complete.
        rids = [req.rid for req in running if not req.finished()]
        return self._decodes_next and any(not self._rounds.is_ahead(rid) for rid in rids)

    def _has_room(self, first: Req, most: int, running: list[Req]) -> bool:
        """Running answers may have outgrown what was expected when it was begun."""
        needed = min(prefill_tokens_left(first), most) + 2 * self._scheduler.page_size
        if self._scheduler._pool().free >= needed:
            return True
        # They end, or are retracted. With none running it goes on as upstream has it.
        return not any(not req.finished() for req in running)

    # --- places ---

    def _go_on(self, req: Req) -> None:
        """Give it SGLang's place for a half-prefilled prompt."""
        if self._scheduler.chunked_req is not req:
            self._park()
            self._scheduler.chunked_req = self.waiting.pop(req.rid)

    def _park(self) -> None:
        req = self._scheduler.chunked_req
        if req is not None:
            self.waiting[req.rid] = req
            self._scheduler.chunked_req = None
            self.totals["prefills_preempted"] += 1

    def leave(self, req: Req) -> None:
        """It loses its KV and waits in the queue again, as one that is retracted."""
        self._park_if(req)
        del self.waiting[req.rid]
        self.totals["prefills_retracted"] += 1

    def _park_if(self, req: Req) -> None:
        if self._scheduler.chunked_req is req:
            self.waiting[req.rid], self._scheduler.chunked_req = req, None

    def abort(self, rid: str, every: bool) -> None:
        """As SGLang aborts a half-prefilled prompt between two chunks."""
        scheduler = self._scheduler
        for req in [r for r in self.waiting.values() if every or r.rid.startswith(rid)]:
            current, pending = scheduler.chunked_req, scheduler._pending_chunked_abort_req
            scheduler.chunked_req = scheduler._pending_chunked_abort_req = req
            del self.waiting[req.rid]
            scheduler.process_pending_chunked_abort()
            scheduler.chunked_req, scheduler._pending_chunked_abort_req = current, pending


def prefill_tokens_left(req: Req) -> int:
    """Of a prompt whose computed part is in prefix_indices, as between two chunks."""
    total = len(req.origin_input_ids) + len(req.output_ids)
    return max(1, total - len(req.prefix_indices))


def reply_tokens_left(req: Req) -> int:
    """As SGLang's PrefillAdder reserves for it."""
    tokens = req.sampling_params.max_new_tokens - len(req.output_ids)
    return max(0, min(tokens, CLIP_MAX_NEW_TOKENS))


def _begins(req: Req) -> bool:
    first = min(_FIRST_TOKENS, req.sampling_params.max_new_tokens)
    return not req.finished() and len(req.output_ids) < first
