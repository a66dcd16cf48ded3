"""With policies on, the thinker's engine runs the policies' scheduler."""

TARGET = "sglang.srt.managers.scheduler.Scheduler"
KIND = "replace"
SIGNATURE = (
    "(server_args: sglang.srt.server_args.ServerArgs, port_args: sglang.srt.server_args.PortArgs)"
)
WHY = "ordering and pacing need paused requests, and interruptions need truncated sessions"
DROP_WHEN = "upstream has a scheduling policy interface that can pause single requests"
STAGES = ("thinker",)
CPU_ONLY = False
WITH_POLICIES = True
HOOK = "sglang_live.bridge.scheduler.live:LiveScheduler"
