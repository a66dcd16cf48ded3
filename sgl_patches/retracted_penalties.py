"""A retracted request keeps its penalties for what it has written before."""

TARGET = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
KIND = "after"
SIGNATURE = "(batch: 'ScheduleBatch', vocab_size: 'int')"
WHY = "a retracted request's tokens are those of one that was not retracted"
DROP_WHEN = "upstream counts the output of retracted requests"
STAGES = ("thinker", "talker")
CPU_ONLY = False
WITH_POLICIES = True
HOOK = "sglang_live.bridge.scheduler.paused:count_written"
