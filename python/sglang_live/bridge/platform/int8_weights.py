"""Weights in 8 bits on a CPU, where a decode step takes the time to read them.

In: a loaded model. Out: the same model, whose linear layers and head multiply int8 weights (a scale
per output) with int8 activations (a scale per token). FBGEMM and oneDNN have kernels for this
(`x86` engine of PyTorch). A token's result does not depend on the other tokens of its batch.
"""

import logging
import os
from functools import cache
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from sglang_live.models.family import CPU_WEIGHTS_ENV, INT8

log = logging.getLogger(__name__)

# Steps of a signed byte.
_STEPS = 127


@cache
def _activation_steps() -> int:
    """Steps of an activation in 0 to 1, as unsigned bytes around this one.

    Without VNNI FBGEMM adds two products in 16 bits, which overflows with steps of 8 bits. Whether
    it does is tried: the answer depends on the processor and on the kernel that PyTorch chooses.
    """
    product = _multiply(torch.ones(1, 64), _packed(torch.ones(16, 64)), _STEPS)
    is_exact = torch.allclose(product, torch.full((1, 16), 64.0), rtol=0.02)
    return _STEPS if is_exact else _STEPS // 2


def _packed(weight: Tensor) -> Any:
    """weight: [n_out, n_in], of floats."""
    scales = weight.abs().amax(dim=1).float().clamp_min(1e-12) / _STEPS
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    quantised = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(quantised, None)


def _multiply(x: Tensor, packed: Any, steps: int) -> Tensor:
    """x: [n, n_in], in -1 to 1. Returns [n, n_out]."""
    product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        x, 1 / steps, steps, packed
    )
    return product


class Int8Weight:
    """A weight, packed for the kernel. SGLang calls `apply` as that of a quantisation method."""

    def __init__(self, weight: Tensor):
        """weight: [n_out, n_in], of floats."""
        self._packed = _packed(weight)
        self._steps = _activation_steps()

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., n_in]. Returns [..., n_out] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1]).float()
        scales = flat.abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
        out = _multiply(flat / scales, self._packed, self._steps)
        out = out.mul_(scales).view(*x.shape[:-1], out.shape[-1])
        return (out if bias is None else out + bias).to(x.dtype)


class _Head(nn.Module):
    """In the place of a head, without its weight: it may be the embedding's, which stays."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.quant_method = Int8Weight(weight)


def wants_int8() -> bool:
    return os.environ.get(CPU_WEIGHTS_ENV) == INT8


def quantise(model: nn.Module) -> None:
    """Quantise the linear layers and the head of a loaded model, in place."""
    torch.backends.quantized.engine = "x86"
    n_layers = 0
    for layer in model.modules():
        if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod:
            layer.quant_method = Int8Weight(layer.weight.data)
            # Not a view, which would keep the float weight.
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
            n_layers += 1
    head = getattr(model, "lm_head", None)
    if isinstance(head, VocabParallelEmbedding):
        model.lm_head = _Head(head.weight.data)
    log.info("weights_in_8_bits layers=%d head=%s", n_layers, head is not None)
