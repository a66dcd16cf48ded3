"""The talker's code predictor: 15 small autoregressive steps inside one codec frame.

Same arithmetic as transformers' Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration; the
loop, its KV cache and the sampling run without a generation framework, batched over streams.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_live.models.qwen3_omni.sampling_noise import GumbelTable

# Fixed in the reference (transformers, talker.prepare_inputs_for_generation).
TOP_K = 50
TOP_P = 0.8


class CodePredictor(nn.Module):
    """
    Args:
        config: code_predictor_config of the checkpoint, as a plain dict.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.n_steps = config["num_code_groups"] - 1
        self.head_dim = (
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        )
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        self.layers = nn.ModuleList(
            _Layer(config, self.head_dim) for _ in range(config["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.gumbel = GumbelTable()
        self.codec_embedding = nn.Parameter(torch.empty(self.n_steps, vocab, hidden))
        self.lm_head = nn.Parameter(torch.empty(self.n_steps, vocab, hidden))
        rope = config.get("rope_parameters") or {}
        self._rope_theta = rope.get("rope_theta") or config["rope_theta"]
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def build_rope(self, device: torch.device, dtype: torch.dtype) -> None:
        """Tables for the n_steps + 1 positions of a frame, computed in float32."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        positions = torch.arange(self.n_steps + 1, dtype=torch.float32)
        angle = torch.outer(positions, self._rope_theta**-exponent)
        angle = torch.cat((angle, angle), dim=-1)
        self.cos = angle.cos().to(device, dtype)
        self.sin = angle.sin().to(device, dtype)

    def forward(
        self, past_hidden: Tensor, first_embed: Tensor, greedy: Tensor | None, draws: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Predict the residual codes of one frame for every stream.

        Args:
            past_hidden: [n, hidden], the talker's normalised hidden state that chose code 0.
            first_embed: [n, hidden], the talker's embedding of code 0.
            greedy: [n] bool, streams that take the argmax; None when all do.
            draws: [n, n_steps] of `draws_of`, for the others; None when all are greedy.
        Returns:
            codes [n, n_steps] int64, and the sum of their embeddings [n, hidden].
        """
        n = past_hidden.shape[0]
        caches = [layer.new_cache(n, self.n_steps + 1, past_hidden) for layer in self.layers]
        x = torch.stack((past_hidden, first_embed), dim=1)
        codes, embed_sum, at = [], torch.zeros_like(first_embed), 0
        for step in range(self.n_steps):
            width = x.shape[1]
            cos, sin = self.cos[at : at + width], self.sin[at : at + width]
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cos, sin, cache, at)
            at += width
            logits = F.linear(self.norm(x[:, -1]), self.lm_head[step])
            code = self.choose(logits, greedy, None if draws is None else draws[:, step])
            embed = F.embedding(code, self.codec_embedding[step])
            codes.append(code)
            embed_sum = embed_sum + embed
            x = embed.unsqueeze(1)
        return torch.stack(codes, dim=1), embed_sum

    def embed_frames(self, codes: Tensor) -> Tensor:
        """Sum of residual embeddings of known frames: codes [n, n_steps] -> [n, hidden]."""
        group = torch.arange(self.n_steps, device=codes.device)
        return self.codec_embedding[group, codes].sum(dim=1)

    def choose(self, logits: Tensor, greedy: Tensor | None, draw: Tensor | None) -> Tensor:
        """Codes [n] from logits [n, vocab]; greedy and draw as in forward(), of one step."""
        if draw is None:
            return logits.argmax(dim=-1)
        top, ids = logits.float().topk(min(TOP_K, logits.shape[-1]), dim=-1)
        # Nucleus in descending order: keep a token while the mass before it is below TOP_P.
        mass = top.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        perturbed = (top + self.gumbel(draw, ids)).masked_fill(before >= TOP_P, -torch.inf)
        pick = perturbed.argmax(dim=-1, keepdim=True)
        if greedy is not None:
            pick = pick.masked_fill(greedy.unsqueeze(1), 0)
        return ids.gather(1, pick).squeeze(1)


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], head_dim: int):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = head_dim
        eps, bias = config["rms_norm_eps"], config.get("attention_bias", False)
        n_qkv = (self.heads + 2 * self.kv_heads) * head_dim
        self.qkv_proj = nn.Linear(hidden, n_qkv, bias=bias)
        self.o_proj = nn.Linear(self.heads * head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def new_cache(self, n: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        shape = (n, self.kv_heads, length, self.head_dim)
        return like.new_empty(shape), like.new_empty(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache, at: int) -> Tensor:
        n, width, _ = x.shape
        qkv = self.qkv_proj(self.input_layernorm(x)).view(n, width, -1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q = _rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        keys, values = cache
        keys[:, :, at : at + width] = _rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        values[:, :, at : at + width] = v.transpose(1, 2)
        end = at + width
        # Only the first call has two positions and needs the causal mask.
        mixed = F.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], is_causal=width > 1, enable_gqa=True
        )
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(n, width, -1))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
