"""Best-effort requests in SGLang's scheduler: what they hold is at the disposal of all others.

A best-effort request that leaves its memory goes back to the queue, and its KV first into the radix
tree: until another request needs the room, it finds it there again. Tree and host evict it before
other KV (bridge/cache/radix.py).
In: decisions of bridge/rounds.py. Owner: one BestEffort per scheduler; equal on all ranks.
"""

import math
import re
import zlib
from array import array
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_live.bridge.best_effort_facts import BestEffortClass
from sglang_live.bridge.rounds import Rounds
from sglang_live.bridge.scheduler.part import Part
from sglang_live.ids import BATCH_PREFIX, is_best_effort

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


if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler


class BestEffort(Part):
    """
    Args:
        into_tree: whether a request's token ids determine its KV, so that the tree may keep it.
    """

    def __init__(self, scheduler: "LiveScheduler", rounds: Rounds, *, into_tree: bool):
        super().__init__(scheduler)
        self._rounds = rounds
        self._into_tree = into_tree

    def _owns(self, req: Req) -> bool:
        return self._rounds.table.is_best_effort(req.rid)

    def queued(self, req: Req) -> None:
        if not self._scheduler.enable_priority_scheduling:
            # Read by the radix tree alone (bridge/cache/radix.py).
            req.priority = PRIORITY if self._owns(req) else PRIORITY_OF_OTHERS

    def may_requeue(self, req: Req) -> bool:
        # A clip would be encoded again, and a session's KV is not the tree's.
        if req.multimodal_inputs is not None or req.session is not None:
            return False
        return self._owns(req) and req.to_finish is None

    def before_prefill(self, running_batch: ScheduleBatch) -> None:
        """Make way for the requests that this round's prefill is for. The queue is whole now: a
        request that returned to it later in the round would be lost."""
        if self._rounds.prefill_budget() == 0:
            return
        if requeue := set(self._rounds.requeue()):
            for req in self._scheduler.partial_prefills():
                if req.rid in requeue and self.may_requeue(req):
                    self._rounds.best_effort.requeue()
                    self._scheduler.memory.requeue(req, len(running_batch.reqs))
        if self._rounds.table.has_best_effort and self._rounds.admits_others():
            # It may be full for a best-effort request that found no room.
            running_batch.batch_is_full = False
            self._make_way(running_batch)

    def _make_way(self, running_batch: ScheduleBatch) -> None:
        """Free memory, a row and a place in the batch for the first request that is admitted."""
        memory = self._scheduler.memory
        queue, _ = self._rounds.admission_order(self._scheduler.with_input())
        if not queue or memory.has_place(queue[0], running_batch):
            return
        others = [req for req in running_batch.reqs if not self._owns(req)]
        n_held = self._rounds.table.best_effort_counts().kv_tokens
        if not memory.fits(queue[0], others, memory.state().free + n_held):
            return  # nor would it fit without best effort
        for rid in self._rounds.retracted_first():
            found = memory.retract_one(rid, running_batch)
            if found and memory.has_place(queue[0], running_batch):
                return

    def before_retraction(self, batch: ScheduleBatch) -> None:
        """Retract best effort until this decode round evicts no idle session. One request always
        may, or none would ever run beside many sessions."""
        memory = self._scheduler.memory
        needed = self._scheduler.page_size * len(batch.reqs)

        def evicts() -> bool:
            pool = memory.state()
            return bool(pool.idle and pool.free - pool.idle < needed)

        if not self._rounds.table.has_best_effort or not evicts():
            return
        for rid in self._rounds.retracted_first()[:-1]:
            if [req.rid for req in batch.reqs] != [rid] and memory.retract_one(rid, batch):
                batch.batch_is_full = False
                if not evicts():
                    return

    def entitled(self, waiting: list[Req]) -> list[Req]:
        """All others, and one of best effort while none of it has a row."""
        table = self._rounds.table
        others = [req for req in waiting if not table.is_best_effort(req.rid)]
        counts = table.best_effort_counts()
        if len(others) == len(waiting) or counts.running + counts.paused:
            return others
        return [*others, next(req for req in waiting if table.is_best_effort(req.rid))]

    def retracted(self, req: Req) -> None:
        if self._owns(req):
            self._rounds.best_effort.retracted(req.kv.kv_committed_len)

    def releases(self, req: Req) -> bool:
        """Into the tree: freed as far as others need it."""
        if not self._into_tree or req.session is not None or not self._owns(req):
            return False
        release_kv_cache(req, self._scheduler.tree_cache, checkpoint=True)
        req.reset_for_retract()
        return True
