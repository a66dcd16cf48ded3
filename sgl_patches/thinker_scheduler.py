"""With policies on, the thinker's engine runs a scheduler that knows that someone listens."""

TARGET = "sglang.srt.managers.scheduler.Scheduler"
KIND = "replace"
SIGNATURE = (
    "(server_args: sglang.srt.server_args.ServerArgs, port_args: sglang.srt.server_args.PortArgs)"
)
WHY = "order, pacing and truncation need a running request to sit out, and a session cut short"
DROP_WHEN = "upstream has a scheduling policy interface with per-request holds"
STAGES = ("thinker",)
CPU_ONLY = False
WITH_POLICIES = True
HOOK = "sglang_live.bridge.scheduler.live:LiveScheduler"
