"""Requests that end at their present length because their user interrupts.

In: Interrupt from the stage. Owner: one Interrupts per scheduler; equal on all ranks.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_live.bridge.scheduler.part import Part
from sglang_live.messages import Interrupt

# Interrupts that are kept until their request arrives: they come on another socket and may be
# first.
_MAX_EARLY = 4096


class Interrupts(Part):
    def start(self) -> None:
        self._early: OrderedDict[str, None] = OrderedDict()
        self._counts = {"interrupted": 0.0}

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {Interrupt: self._on_interrupt}

    def _on_interrupt(self, interrupt: Interrupt) -> None:
        scheduler = self._scheduler
        live = {*scheduler.waiting_queue, *scheduler.collect_inflight_reqs()}
        if scheduler.chunked_req is not None:
            live.add(scheduler.chunked_req)
        reqs = [req for req in live if req.rid == interrupt.to]
        if not reqs:
            self._early[interrupt.to] = None
            while len(self._early) > _MAX_EARLY:
                self._early.popitem(last=False)
        for req in reqs:
            self._interrupt(req)

    def queues(self, req: Req, is_retracted: bool) -> None:
        if req.rid in self._early:
            del self._early[req.rid]
            self._interrupt(req)

    def _interrupt(self, req: Req) -> None:
        """Finish a request at its present length. Unlike an abort, that keeps its session's KV."""
        self._counts["interrupted"] += 1
        if not isinstance(req.to_finish, FINISH_ABORT):
            req.sampling_params.max_new_tokens = len(req.output_ids)
        for part in self._scheduler.parts:
            part.interrupted(req)

    def totals(self) -> dict[str, float]:
        return self._counts
