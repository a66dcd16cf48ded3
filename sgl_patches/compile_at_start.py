"""Nothing is compiled while an engine serves."""

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs"
KIND = "after"
SIGNATURE = "(self, capture_decode_cuda_graph: 'bool' = True)"
WHY = "upstream compiles functions when a request first calls them, and all requests wait for it"
DROP_WHEN = "upstream compiles before it serves, or not at all"
STAGES = ("*",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.compiling:end_compiling"
