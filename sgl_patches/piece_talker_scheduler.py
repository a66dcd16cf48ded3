"""With policies on, the engine of a talker that speaks pieces runs the policies' scheduler."""

TARGET = "sglang.srt.managers.scheduler.Scheduler"
KIND = "replace"
SIGNATURE = (
    "(server_args: sglang.srt.server_args.ServerArgs, port_args: sglang.srt.server_args.PortArgs)"
)
WHY = "ordering and pacing need paused requests"
DROP_WHEN = "upstream has a scheduling policy interface that can pause single requests"
STAGES = ("piece_talker",)
CPU_ONLY = False
WITH_POLICIES = True
HOOK = "sglang_live.bridge.scheduler.piece_talker:PieceTalkerScheduler"
