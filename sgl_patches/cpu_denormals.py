"""Denormal numbers as zeros where a model runs."""

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.initialize"
KIND = "around"
SIGNATURE = "(self)"
WHY = "the reference attention reads memory that it never wrote: 60 times slower if denormal"
DROP_WHEN = "torch_native computes no rows for the tokens of the prefix"
STAGES = ("*",)
CPU_ONLY = True
HOOK = "sglang_live.bridge.platform_cpu:flush_denormals_and"
