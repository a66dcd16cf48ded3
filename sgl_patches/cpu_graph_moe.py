"""A reference mixture of experts that can be captured."""

TARGET = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
KIND = "around"
SIGNATURE = (
    "(layer: torch.nn.modules.module.Module, x: torch.Tensor, "
    "topk_output: sglang.srt.layers.moe.topk.StandardTopKOutput, "
    "moe_runner_config: sglang.srt.layers.moe.moe_runner.base.MoeRunnerConfig) -> torch.Tensor"
)
WHY = "upstream's reference reads the number of tokens of each expert on the host"
DROP_WHEN = "upstream's moe_forward_native can be captured"
STAGES = ("*",)
CPU_ONLY = True
WITH_GRAPHS = True
HOOK = "sglang_live.bridge.platform.cpu_graph:moe_as_one_call"
