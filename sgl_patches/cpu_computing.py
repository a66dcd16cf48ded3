"""Priority, and flushing of denormals, of threads that run a model without a GPU."""

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.initialize"
KIND = "around"
SIGNATURE = "(self)"
WHY = "other threads must not be delayed, and denormals slow the reference attention 60-fold"
DROP_WHEN = "upstream has a hook before the first forward, and torch_native skips unused rows"
STAGES = ("*",)
CPU_ONLY = True
HOOK = "sglang_live.bridge.platform.cpu:begin_computing_and"
