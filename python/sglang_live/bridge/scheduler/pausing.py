"""Requests that pause and resume: by the decisions of policies, or because they lack input.

Owner: one Pausing per scheduler; equal on all ranks.
"""

from collections.abc import Iterable

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_live.bridge.scheduler.part import Part
from sglang_live.bridge.scheduler.paused import PausedRequest, decode_batch_of


class Pausing(Part):
    """
    Attributes:
        requests: those that are paused, by id; they keep row, KV and tree lock.
    """

    def start(self) -> None:
        self.requests: dict[str, PausedRequest] = {}
        parts = self._scheduler.parts
        # Asked of every request in every round.
        self._blocks = [p.blocks for p in parts if type(p).blocks is not Part.blocks]
        self._pauses = [p.pauses for p in parts if type(p).pauses is not Part.pauses]

    def blocked(self, req: Req) -> bool:
        """Whether the input of the request's next step does not exist yet."""
        return any(blocks(req) for blocks in self._blocks)

    def _must_pause(self, req: Req) -> bool:
        must_end = len(req.output_ids) >= req.sampling_params.max_new_tokens
        if req.finished() or req.to_finish is not None or must_end:
            return False
        return self.blocked(req) or any(pauses(req) for pauses in self._pauses)

    def pause(self, batch: ScheduleBatch) -> None:
        parts = self._scheduler.parts
        if not any(part.may_block() or part.may_pause() for part in parts):
            return
        must_pause = [self._must_pause(req) for req in batch.reqs]
        if not any(must_pause):
            return
        for index, pauses in enumerate(must_pause):
            if pauses:
                paused = PausedRequest.of(batch, index)
                self.requests[paused.req.rid] = paused
                if not self.blocked(paused.req):
                    for part in parts:
                        part.paused(paused.req)
        batch.filter_batch(keep_indices=[i for i, pauses in enumerate(must_pause) if not pauses])
        batch.batch_is_full = False

    def resume(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        """The batch, with the requests that need not pause any longer."""
        back = []
        for paused in [p for p in self.requests.values() if not self._must_pause(p.req)]:
            if not paused.req.finished():
                if paused.step_in_flight:
                    continue
                back.append(paused)
            # With overlap it may have ended in the step that was in flight when it was paused.
            del self.requests[paused.req.rid]
            for part in self._scheduler.parts:
                part.resumed(paused.req.rid)
        if not back:
            return running_batch
        batch = decode_batch_of(self._scheduler, back)
        if running_batch.is_empty():
            batch.batch_is_full = running_batch.batch_is_full
            return batch
        running_batch.merge_batch(batch)
        return running_batch

    # --- hooks ---

    def cannot_step(self) -> Iterable[str]:
        return [rid for rid, p in self.requests.items() if p.step_in_flight or self.blocked(p.req)]

    def outside_batches(self) -> Iterable[Req]:
        return [paused.req for paused in self.requests.values()]

    def awaits_input(self) -> bool:
        return bool(self.requests)

    def before_retract_all(self) -> None:
        # SGLang's pause with mode "retract" covers the running batch only.
        in_flight = {rid: p for rid, p in self.requests.items() if p.step_in_flight}
        back = [p for rid, p in self.requests.items() if rid not in in_flight]
        if not back:
            return
        batch = decode_batch_of(self._scheduler, back)
        self.requests = in_flight
        running = self._scheduler.running_batch
        if running.is_empty():
            self._scheduler.running_batch = batch
        else:
            running.merge_batch(batch)

    def totals(self) -> dict[str, float]:
        return {"paused_now": float(len(self.requests))}
