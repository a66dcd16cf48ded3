"""Mixture of experts in PyTorch's own operators, without a wait for the device.

SGLang's native version reads the number of tokens per expert on the host: that cannot be captured
in a CUDA graph. Its Triton version needs sgl-kernel to sort the tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

# Limit of the weights that are gathered for the rows where PyTorch has no grouped product.
MAX_GATHERED_BYTES = 256 << 20


def register(platform_key: str) -> None:
    """Make this the forward of SGLang's unquantised experts on an out-of-tree platform."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, forward, platform_key)


def forward(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """As UnquantizedFusedMoEMethod.forward_native."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    config = method.moe_runner_config
    modified = config.gemm1_alpha, config.gemm1_clamp_limit, getattr(layer, "w13_weight_bias", None)
    if (
        config.activation != "silu"
        or config.apply_router_weight_on_input
        or any(value is not None for value in modified)
    ):
        raise ValueError("without sgl-kernel, experts are SwiGLU without bias or clamp")
    weights, ids, _ = dispatch_output.topk_output
    out = run_experts(
        dispatch_output.hidden_states, weights, ids, layer.w13_weight, layer.w2_weight
    )
    return StandardCombineInput(hidden_states=out)


def run_experts(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """
    Args:
        x: [n_tokens, hidden].
        weights: [n_tokens, top_k], float.
        ids: [n_tokens, top_k], of experts; below 0 in rows of padding, whose result is not used.
        w13: [n_experts, 2 * intermediate, hidden], gate before up.
        w2: [n_experts, hidden, intermediate].
    Returns:
        [n_tokens, hidden], in the dtype of x.
    """
    n_tokens, top_k = ids.shape
    expert_of, order = ids.clamp(min=0).flatten().sort(stable=True)
    experts = torch.arange(w13.shape[0], device=x.device, dtype=ids.dtype)
    ends = torch.searchsorted(expert_of, experts, right=True, out_int32=True)
    gate, up = _by_expert(x[order // top_k], w13, expert_of, ends).chunk(2, dim=-1)
    sorted_out = _by_expert(silu(gate) * up, w2, expert_of, ends)
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    parts = out.view(n_tokens, top_k, -1).to(weights.dtype)
    return (parts * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _by_expert(rows: Tensor, weight: Tensor, expert_of: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row with its expert's weight.

    Args:
        rows: [n_rows, n_in], sorted by expert.
        weight: [n_experts, n_out, n_in].
        expert_of: [n_rows], ascending.
        ends: [n_experts] int32, behind the last row of each.
    Returns:
        [n_rows, n_out].
    """
    if _has_grouped_product(rows, weight):
        return grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    if rows.shape[0] * weight[0].nbytes <= MAX_GATHERED_BYTES or _is_capturing(rows):
        return torch.bmm(weight[expert_of], rows.unsqueeze(-1)).squeeze(-1)
    # Waits for the device: only in eager prefills whose dtype or device has no grouped product.
    begins = [0, *ends.tolist()]
    spans = zip(begins[:-1], begins[1:], weight, strict=True)
    return torch.cat([rows[begin:end] @ one.T for begin, end, one in spans])


def _has_grouped_product(rows: Tensor, weight: Tensor) -> bool:
    if rows.dtype != torch.bfloat16 or weight.shape[1] % 8 or weight.shape[2] % 8:
        return False
    # On other GPUs PyTorch reads the ends on the host.
    return not rows.is_cuda or torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def _is_capturing(rows: Tensor) -> bool:
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()
