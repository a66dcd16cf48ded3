"""Classifier-free guidance of a talker in one request.

Both prompts of a pair have the same length, ids and positions, so the KV of a token holds both, as
twice the heads. Admission, pauses, retractions, SGLang's radix tree and graphs know of one request.
Hidden states come as [2 * n, width], those of the guided prompts before the others.
"""

from collections.abc import Callable

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.llama import LlamaAttention, LlamaMLP
from torch import Tensor, nn


class PairAttention(nn.Module):
    def __init__(self, one: LlamaAttention, layer_id: int):
        """one: with the heads of one of the pair; its weights are used, its cache is not."""
        super().__init__()
        self.qkv_proj, self.o_proj, self.rotary_emb = one.qkv_proj, one.o_proj, one.rotary_emb
        self._sizes = [one.q_size, one.kv_size, one.kv_size]
        self.attn = RadixAttention(
            2 * one.num_heads,
            one.head_dim,
            one.scaling,
            num_kv_heads=2 * one.num_kv_heads,
            layer_id=layer_id,
        )

    def forward(self, positions: Tensor, hidden: Tensor, forward_batch) -> Tensor:
        """positions: [2 * n]."""
        query, key, value = self.qkv_proj(hidden)[0].split(self._sizes, dim=-1)
        query, key = self.rotary_emb(positions, query, key)
        joined = [torch.cat(x.chunk(2), dim=1) for x in (query, key, value)]
        found = self.attn(*joined, forward_batch)
        out: Tensor = self.o_proj(torch.cat(found.chunk(2, dim=1)))[0]
        return out


class PairLayer(nn.Module):
    """A layer of a Llama, with the names that Zonos has for its parts."""

    def __init__(
        self,
        config,
        layer_id: int,
        quant_config,
        new_norm: Callable[[], nn.Module],
        *,
        is_neox_style: bool = True,
    ):
        """config: with the heads of both of the pair."""
        super().__init__()
        width, prefix = config.hidden_size, f"model.layers.{layer_id}"
        one = LlamaAttention(
            config,
            width,
            config.num_attention_heads // 2,
            config.num_key_value_heads // 2,
            layer_id,
            rope_theta=config.rope_parameters["rope_theta"],
            rope_scaling=config.rope_parameters,
            rope_is_neox_style=is_neox_style,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=quant_config,
            prefix=f"{prefix}.mixer",
        )
        self.norm, self.norm2 = new_norm(), new_norm()
        self.mixer = PairAttention(one, layer_id)
        self.mlp = LlamaMLP(width, config.intermediate_size, "silu", quant_config, f"{prefix}.mlp")

    def forward(self, positions: Tensor, hidden: Tensor, forward_batch) -> Tensor:
        hidden = hidden + self.mixer(positions, self.norm(hidden), forward_batch)
        fed: Tensor = self.mlp(self.norm2(hidden))
        return hidden + fed


def guided(hidden: Tensor, weight: float) -> Tensor:
    """[n, width] of the final states of pairs; the logits of a linear head without bias are guided
    with it.

    weight: 1: as the guided prompt alone.
    """
    told, untold = hidden.chunk(2)
    return untold + weight * (told - untold)
