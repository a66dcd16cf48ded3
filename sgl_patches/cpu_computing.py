"""What a thread that computes a model without a GPU owes to others, and to itself."""

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.initialize"
KIND = "around"
SIGNATURE = "(self)"
WHY = "a tokenizer beside it must be on time; and denormals make the reference attention crawl"
DROP_WHEN = "upstream says when a process begins to compute, and torch_native computes what is used"
STAGES = ("*",)
CPU_ONLY = True
HOOK = "sglang_live.bridge.platform.cpu:begin_computing_and"
