"""Prefill graphs keep the tensors between their segments where no kernel refers to them weakly."""

from typing import Any

TARGET = (
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
    "._weak_ref_if_tensor"
)
KIND = "replace"
SIGNATURE = "(x)"
WHY = "upstream refers to them by a kernel of sgl-kernel, without which capture fails"
DROP_WHEN = "upstream refers to them weakly on any platform"
STAGES = ("thinker", "talker", "piece_talker")
CPU_ONLY = True
CUDA_NATIVE = True


def _kept(x: Any) -> Any:
    return x


HOOK = _kept
