"""Best-effort requests in SGLang's scheduler: what they hold is at the disposal of all others.

A best-effort request that leaves its memory goes back to the queue, and its KV first into the radix
tree: until another request needs the room, it finds it there again. Tree and host evict it before
other KV (bridge/session/radix.py).
In: decisions of bridge/rounds.py. Owner: one BestEffort per scheduler; equal on all ranks.
"""

import math
import re
import zlib
from array import array
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_live.bridge.best_effort_facts import BestEffortClass
from sglang_live.engine_channel.messages import BATCH_PREFIX, is_best_effort

# Prompts with the same first tokens are served one after the other.
_PREFIX_TOKENS = 64
_EXPIRY = re.compile(re.escape(BATCH_PREFIX) + r"by(\d{1,12})-")
# SGLang's tree keeps the highest priority of a node, and adds one to that of prompts: the largest
# one for all other requests leaves their order as it is, by last use.
PRIORITY, PRIORITY_OF_OTHERS = -2, 2**63 - 1


def class_of(req: Req, *, kv_by_tokens: bool = True) -> BestEffortClass | None:
    """None: it is no best-effort request.

    kv_by_tokens: whether a request's token ids determine its KV.
    """
    if not is_best_effort(req.rid):
        return None
    expiry = _EXPIRY.match(req.rid)
    prompt = array("q", req.origin_input_ids).tobytes()
    return BestEffortClass(
        deadline_s=float(expiry[1]) if expiry else math.inf,
        prefix=zlib.crc32(prompt[: 8 * _PREFIX_TOKENS]),
        prompt=prompt if kv_by_tokens else b"",
    )


class BestEffort:
    """
    Args:
        into_tree: whether a request's token ids determine its KV, so that the tree may keep it.
    """

    def __init__(self, scheduler: Any, *, into_tree: bool):
        assert scheduler.rounds is not None
        self._scheduler, self._rounds, self._into_tree = scheduler, scheduler.rounds, into_tree

    def owns(self, req: Req) -> bool:
        return self._rounds.table.is_best_effort(req.rid)

    def half_prefilled(self) -> list[Req]:
        """Half-prefilled requests that can return to the queue."""
        return [req for req in self._scheduler.partial_prefills() if self._can_requeue(req)]

    def _can_requeue(self, req: Req) -> bool:
        # A clip would be encoded again, and a session's KV is not the tree's.
        if req.multimodal_inputs is not None or req.session is not None:
            return False
        return self._rounds.table.is_best_effort(req.rid) and req.to_finish is None

    def before_prefill(self, running_batch: ScheduleBatch) -> None:
        """Make way for the requests that this round's prefill is for. The queue is whole now: a
        request that returned to it later in the round would be lost."""
        if self._rounds.prefill_budget() == 0:
            return
        if requeue := set(self._rounds.requeue()):
            for req in [req for req in self.half_prefilled() if req.rid in requeue]:
                self._rounds.best_effort.requeue()
                self._scheduler.requeue(req, len(running_batch.reqs))
        if self._rounds.table.has_best_effort and self._rounds.admits_others():
            # It may be full for a best-effort request that found no room.
            running_batch.batch_is_full = False
            self._make_way(running_batch)

    def _make_way(self, running_batch: ScheduleBatch) -> None:
        """Free memory, a row and a place in the batch for the first request that is admitted."""
        scheduler = self._scheduler
        queue, _ = scheduler._admission_order(scheduler.waiting_queue)
        if not queue or scheduler.has_place(queue[0], running_batch):
            return
        others = [req for req in running_batch.reqs if not self.owns(req)]
        n_held = self._rounds.table.best_effort_counts().kv_tokens
        if not scheduler.fits(queue[0], others, scheduler._pool().free + n_held):
            return  # nor would it fit without best effort
        for rid in self._rounds.retracted_first():
            found = scheduler._retract_one(rid, running_batch)
            if found and scheduler.has_place(queue[0], running_batch):
                return

    def leave_sessions(self, batch: ScheduleBatch) -> None:
        """Retract best effort until this decode round evicts no idle session. One request always
        may, or none would ever run beside many sessions."""
        scheduler, needed = self._scheduler, self._scheduler.page_size * len(batch.reqs)

        def evicts() -> bool:
            pool = scheduler._pool()
            return bool(pool.idle and pool.free - pool.idle < needed)

        if not self._rounds.table.has_best_effort or not evicts():
            return
        for rid in self._rounds.retracted_first()[:-1]:
            if [req.rid for req in batch.reqs] != [rid] and scheduler._retract_one(rid, batch):
                batch.batch_is_full = False
                if not evicts():
                    return

    def may_take_rows(self, waiting: list[Req]) -> list[Req]:
        """The waiting requests that may have rows of idle sessions: one of best effort at most."""
        table = self._rounds.table
        others = [req for req in waiting if not table.is_best_effort(req.rid)]
        counts = table.best_effort_counts()
        if len(others) == len(waiting) or counts.running + counts.paused:
            return others
        return [*others, next(req for req in waiting if table.is_best_effort(req.rid))]

    def retracted(self, req: Req) -> None:
        """Count a request that loses its memory to others."""
        if self._rounds.table.is_best_effort(req.rid):
            self._rounds.best_effort.retracted(req.kv.kv_committed_len)

    def release_into_tree(self, req: Req) -> bool:
        """Free a best-effort request's KV and row as far as others need them. Returns False if
        that is not possible: nothing was released then."""
        if not self._into_tree or req.session is not None:
            return False
        if not self._rounds.table.is_best_effort(req.rid):
            return False
        release_kv_cache(req, self._scheduler.tree_cache, checkpoint=True)
        req.reset_for_retract()
        return True
