"""Penalties do not depend on the other requests of a round, nor on pauses."""

TARGET = "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
KIND = "around"
SIGNATURE = "(self)"
WHY = "with overlap upstream counts one token less, except when no step is in flight"
DROP_WHEN = "penalties are counted where tokens are committed"
STAGES = ("thinker", "talker", "piece_talker")
CPU_ONLY = False
WITH_POLICIES = True
HOOK = "sglang_live.bridge.scheduler.paused:cumulate_one_behind"
