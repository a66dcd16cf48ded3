"""Penalties do not depend on who shares the rounds, nor on having sat out some."""

TARGET = "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
KIND = "around"
SIGNATURE = "(self)"
WHY = "with overlap upstream is one token behind as a rule, but not when nothing is in flight"
DROP_WHEN = "penalties are counted where tokens are committed"
STAGES = ("thinker", "talker")
CPU_ONLY = False
WITH_POLICIES = True
HOOK = "sglang_live.bridge.scheduler.paused:cumulate_one_behind"
