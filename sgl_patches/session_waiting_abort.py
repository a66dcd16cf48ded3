"""Aborting a waiting request must release its session for the next one."""

TARGET = "sglang.srt.managers.scheduler.Scheduler._release_aborted_request"
KIND = "after"
SIGNATURE = "(self, req: sglang.srt.managers.schedule_batch.Req) -> None"
WHY = "the session otherwise rejects every later request and never closes: its KV leaks"
DROP_WHEN = "upstream calls session.abort_req() for requests aborted in the waiting queue"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.session.truncate:release_waiting"
