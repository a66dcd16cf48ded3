"""Batches of a modelled device have results when their modelled time has passed."""

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
KIND = "around"
SIGNATURE = (
    "(self, batch: sglang.srt.managers.schedule_batch.ScheduleBatch, pp_proxy_tensors: "
    "Optional[sglang.srt.model_executor.forward_batch_info.PPProxyTensors] = None) -> Union["
    "sglang.srt.managers.utils.GenerationBatchResult, "
    "sglang.srt.managers.utils.EmbeddingBatchResult]"
)
WHY = "without a GPU, schedulers are tried on a device whose rounds take a GPU's time"
DROP_WHEN = "upstream has an asynchronous device for machines without one"
STAGES = ("thinker", "talker", "piece_talker")
CPU_ONLY = True
WITH_DEVICE_MODEL = True
HOOK = "sglang_live.bridge.modelled.batches:run_batch_on_clock"
