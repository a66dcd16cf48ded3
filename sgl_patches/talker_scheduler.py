"""The talker's engine runs a scheduler in which requests without text are blocked."""

TARGET = "sglang.srt.managers.scheduler.Scheduler"
KIND = "replace"
SIGNATURE = (
    "(server_args: sglang.srt.server_args.ServerArgs, port_args: sglang.srt.server_args.PortArgs)"
)
WHY = "a talker step needs a text token that the thinker may not have produced yet"
DROP_WHEN = "upstream can exclude a running request from a decode round without freeing it"
STAGES = ("talker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.scheduler.live:LiveScheduler"
