"""Moshi's depth transformer: the codes of a frame, one after the other, in the step that has drawn
its text token.

Every code has weights of its own; positions have none. Source: moshi 0.2.13 (models/lm.py).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_live.models.speech_lm.sampler import Sampler

_EPS = 1e-8


class DepthTransformer(nn.Module):
    """Weights are [n_codes, ...]: of each code. Those of a checkpoint with steps for the user's
    codes, too, end with its own: no earlier step sees a later one."""

    def __init__(self, config: Mapping[str, Any], width: int, text_card: int, sampler: Sampler):
        """
        Args:
            config: see parts._talker_config.
            width: of the language model.
            sampler: of codes, whose temperature is 0.8, as in the reference.
        """
        super().__init__()
        n, own, inner = config["n_codes"], config["depth_width"], config["depth_inner"]
        self.n_codes, self._heads, self._sampler = n, config["depth_heads"], sampler
        self.text_emb = nn.Parameter(torch.empty(text_card + 1, own))
        self.emb = nn.Parameter(torch.empty(n - 1, config["card"] + 1, own))
        self.inputs = nn.Parameter(torch.empty(n, own, width))
        self.heads = nn.Parameter(torch.empty(n, config["card"], own))
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {
                    "qkv": torch.empty(n, 3 * own, own),
                    "out": torch.empty(n, own, own),
                    "gate_up": torch.empty(n, 2 * inner, own),
                    "down": torch.empty(n, own, inner),
                    "norm1": torch.empty(own),
                    "norm2": torch.empty(own),
                }
            )
            for _ in range(config["depth_layers"])
        )

    temperature = 0.8

    def forward(
        self,
        hidden: Tensor,
        text: Tensor,
        forced: Tensor | None,
        greedy: Tensor | None,
        draws: Tensor | None,
    ) -> Tensor:
        """
        Args:
            hidden: [n, width], the normalised states that have drawn `text` [n].
            forced: [n, n_codes] int64, codes that are known; -1: to be drawn. None: none is known.
            greedy: [n] bool, requests that take the likeliest codes; None: all do.
            draws: [n, n_codes] of `draws_of`; None: all are greedy.
        Returns:
            [n, n_codes] int64.
        """
        n, codes = len(hidden), []
        caches: list[list[Tensor]] = [[] for _ in self.layers]
        before = F.embedding(text, self.text_emb)
        for step in range(self.n_codes):
            x = F.linear(hidden, self.inputs[step]) + before
            for layer, cache in zip(self.layers, caches, strict=True):
                normed = F.rms_norm(x, x.shape[-1:], layer["norm1"], _EPS)
                qkv = F.linear(normed, layer["qkv"][step]).view(n, 3, self._heads, -1)
                cache.append(qkv[:, 1:])
                keys, values = torch.stack(cache, dim=3).unbind(1)
                mixed = F.scaled_dot_product_attention(qkv[:, 0].unsqueeze(2), keys, values)
                x = x + F.linear(mixed.reshape(n, -1), layer["out"][step])
                normed = F.rms_norm(x, x.shape[-1:], layer["norm2"], _EPS)
                gate, up = F.linear(normed, layer["gate_up"][step]).chunk(2, dim=-1)
                x = x + F.linear(F.silu(gate) * up, layer["down"][step])
            logits = F.linear(x, self.heads[step])
            draw = None if draws is None else draws[:, step]
            code = self._sampler.choose(logits, self.temperature, greedy, draw)
            if forced is not None:
                code = torch.where(forced[:, step] < 0, code, forced[:, step])
            codes.append(code)
            if step + 1 < self.n_codes:
                before = F.embedding(code, self.emb[step])
        return torch.stack(codes, dim=1)
