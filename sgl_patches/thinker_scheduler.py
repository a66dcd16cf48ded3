"""With policies on, the engines of a thinker and of a talker that speaks pieces pause requests."""

TARGET = "sglang.srt.managers.scheduler.Scheduler"
KIND = "replace"
SIGNATURE = (
    "(server_args: sglang.srt.server_args.ServerArgs, port_args: sglang.srt.server_args.PortArgs)"
)
WHY = "ordering and pacing need paused requests, and interruptions need truncated sessions"
DROP_WHEN = "upstream has a scheduling policy interface that can pause single requests"
STAGES = ("thinker", "piece_talker")
CPU_ONLY = False
WITH_POLICIES = True
HOOK = "sglang_live.bridge.scheduler.live:LiveScheduler"
