"""Prompts that are prefilled in slices, and wait between two of them for shorter ones.

SGLang goes on with one half-prefilled prompt until it is complete. Here it may leave its place
with row, KV and tree lock kept, as it is between any two chunks, and take it again later: nothing
is computed twice. What it still needs stays reserved, so that no two such prompts fill the pool.
Owner: one PutBack per scheduler; equal on all ranks, because it decides by what is broadcast.
"""

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_live.policy.put_back import passing

# Tokens of an answer until it is heard: two chunks of the talker's, twice.
_FIRST_TOKENS = 16


class PutBack:
    """waiting: put back, by request id."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self.waiting: dict[str, Req] = {}
        self._sliced_s: dict[str, float] = {}
        self.totals = {"put_backs": 0.0}

    def reqs(self) -> list[Req]:
        return list(self.waiting.values())

    def half_way(self) -> list[Req]:
        current = self._scheduler.chunked_req
        return self.reqs() if current is None else [*self.waiting.values(), current]

    def choose(self, queue: list[Req], running: list[Req]) -> tuple[list[Req], list[Req]] | None:
        """Who prefills in this round: sets the scheduler's chunked_req.

        Returns:
            of the queue, those that may be admitted now, and the others. None: no prefill, so that
            answers that have just begun get to their first sound.
        """
        scheduler, half = self._scheduler, self.half_way()
        if not half:
            return queue, []
        rounds = scheduler.rounds
        left = {req.rid: tokens_left(req) for req in half}
        first = min(half, key=lambda req: (left[req.rid], req.rid))
        reserved = sum(left[req.rid] + _answer(req) for req in half)
        promised = sum(_answer(req) for req in running)
        free = scheduler._pool().free - reserved - promised - scheduler.page_size
        waiting = [scheduler._tokens_to_prefill(req) for req in queue]
        needed = [n + _answer(req) for n, req in zip(waiting, queue, strict=True)]
        idle_s = rounds.now_s - self._sliced_s.get(first.rid, rounds.now_s)
        chosen = [
            index
            for index in passing(
                left[first.rid], waiting, idle_s=idle_s, free=free, config=rounds.config
            )
            if needed[index] <= free
        ]
        if chosen:
            # One at a time: each was measured by itself.
            self._park()
            place = chosen[0]
            return [queue[place]], [*queue[:place], *queue[place + 1 :]]
        if idle_s < rounds.config.max_put_back_s and any(map(_begins, running)):
            return None
        self.go_on(first)
        return ([], queue) if self.waiting else (queue, [])

    def go_on_with_shortest(self) -> None:
        self.go_on(min(self.reqs(), key=lambda req: (tokens_left(req), req.rid)))

    def go_on(self, req: Req) -> None:
        """Give it SGLang's place for a half-prefilled prompt."""
        if self._scheduler.chunked_req is not req:
            self._park()
            self._scheduler.chunked_req = self.waiting.pop(req.rid)

    def _park(self) -> None:
        req = self._scheduler.chunked_req
        if req is not None:
            self.waiting[req.rid] = req
            self._scheduler.chunked_req = None
            self.totals["put_backs"] += 1

    def sliced(self, reqs: list[Req], now_s: float) -> None:
        """A slice of these was launched."""
        half = {req.rid for req in self.half_way()}
        self._sliced_s = {rid: at_s for rid, at_s in self._sliced_s.items() if rid in half}
        self._sliced_s |= {req.rid: now_s for req in reqs if req.rid in half}

    def abort(self, rid: str, every: bool) -> None:
        """As SGLang aborts a half-prefilled prompt between two chunks."""
        scheduler = self._scheduler
        for req in [r for r in self.reqs() if every or r.rid.startswith(rid)]:
            current, pending = scheduler.chunked_req, scheduler._pending_chunked_abort_req
            scheduler.chunked_req = scheduler._pending_chunked_abort_req = req
            del self.waiting[req.rid]
            scheduler.process_pending_chunked_abort()
            scheduler.chunked_req, scheduler._pending_chunked_abort_req = current, pending


def tokens_left(req: Req) -> int:
    total = len(req.origin_input_ids) + len(req.output_ids)
    return max(1, total - len(req.prefix_indices))


def _answer(req: Req) -> int:
    return max(
        0, min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
    )


def _begins(req: Req) -> bool:
    return not req.finished() and len(req.output_ids) < _FIRST_TOKENS
