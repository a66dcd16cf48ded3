"""A talker that speaks pieces is sampled with seeds, and retracted requests keep penalties."""

TARGET = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
KIND = "after"
SIGNATURE = "(batch: 'ScheduleBatch', vocab_size: 'int')"
WHY = "a response does not depend on the other requests of its batch"
DROP_WHEN = "upstream takes seeds without deterministic inference, and restores penalties"
STAGES = ("piece_talker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.scheduler.piece_talker:sample_alone"
