"""Decode graphs on the CPU platform, where a test has asked for them."""

TARGET = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph"
KIND = "around"
SIGNATURE = "(*, model_runner: 'ModelRunner') -> 'GraphCapture'"
WHY = "on a CPU upstream captures for torch.compile only, and nothing with torch_native attention"
DROP_WHEN = "upstream captures on every platform whose capabilities include graph_capture"
STAGES = ("*",)
CPU_ONLY = True
WITH_GRAPHS = True
HOOK = "sglang_live.bridge.platform.cpu_graph:capture_decode_graph"
