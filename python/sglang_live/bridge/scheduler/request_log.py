"""Log lines about the requests of turns, from the scheduler's process.

In: requests of the schedulers. Out: lines that name the request; its id holds those of its session
and turn. Rank 0 alone has this part. Requests of SGLang's own API and frames have no lines: the
latter come 12.5 times a second.
"""

import logging

from sglang.srt.managers.schedule_batch import Req

from sglang_live.bridge.scheduler.part import Part
from sglang_live.ids import is_logged

log = logging.getLogger(__name__)


class RequestLog(Part):
    def queues(self, req: Req, is_retracted: bool) -> None:
        if is_logged(req.rid):
            line = "request_queued rid=%s n_prompt=%d"
            retracted = "request_retracted rid=%s n_prompt=%d"
            log.info(retracted if is_retracted else line, req.rid, len(req.origin_input_ids))

    def interrupted(self, req: Req) -> None:
        if is_logged(req.rid):
            log.info("request_interrupted rid=%s n_output=%d", req.rid, len(req.output_ids))

    def ended(self, req: Req, first: bool) -> None:
        if first and is_logged(req.rid):
            reason = req.finished_reason.to_json()["type"]
            line = "request_finished rid=%s reason=%s n_output=%d"
            log.info(line, req.rid, reason, len(req.output_ids))

    def aborted(self, req: Req) -> None:
        if is_logged(req.rid):
            log.info("request_aborted rid=%s", req.rid)
