"""Fills the models from their checkpoints."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sglang_live.models.speech_lm.engine.weights import lacking, load_llama_weight


@torch.no_grad()
def load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError: names the weights that are unknown or lack."""
    params, loaded = dict(model.named_parameters()), Counter[str]()
    if hasattr(model, "text_table"):
        params["text_table"] = model.text_table
    for name, tensor in weights:
        target = load_llama_weight(params, name, tensor)
        if target not in params:
            raise ValueError(f"unknown weight {name}")
        loaded[target] += 1
    if names := lacking(params, loaded):
        raise ValueError(f"checkpoint lacks {names}")
