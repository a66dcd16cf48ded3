"""A talker's code predictor: small autoregressive steps inside one codec frame.

Same arithmetic as transformers' Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration; the
loop, its KV cache and the sampling run without a generation framework, batched over streams.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_live.models.speech_lm.sampler import Sampler


class CodePredictor(nn.Module):
    """
    Args:
        config: code_predictor_config of the checkpoint, as a plain dict.
        sampler, temperature: of sampled codes.
        talker_width: of the talker's states and of the codes' embeddings, if it is another than
            the predictor's own, to which small_to_mtp_projection then leads.
        llama_frequencies: [head_dim / 2], of the rotary embedding. None: the layers are Qwen3's.
            Llama's have no norms of queries and keys, and there always is a projection, without a
            bias.
    """

    def __init__(
        self,
        config: dict[str, Any],
        *,
        sampler: Sampler,
        temperature: float = 1.0,
        talker_width: int | None = None,
        llama_frequencies: Tensor | None = None,
    ):
        super().__init__()
        self.sampler = sampler
        self._temperature = temperature
        self.n_steps = config["num_code_groups"] - 1
        self.head_dim = (
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        )
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        self._width = talker_width or hidden
        is_qwen = llama_frequencies is None
        projects = self._width != hidden or not is_qwen
        self.small_to_mtp_projection = (
            nn.Linear(self._width, hidden, bias=is_qwen) if projects else None
        )
        self.layers = nn.ModuleList(
            _Layer(config, self.head_dim, norms_qk=is_qwen)
            for _ in range(config["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.codec_embedding = nn.Parameter(torch.empty(self.n_steps, vocab, self._width))
        self.lm_head = nn.Parameter(torch.empty(self.n_steps, vocab, hidden))
        if llama_frequencies is None:
            rope = config.get("rope_parameters") or {}
            theta = rope.get("rope_theta") or config["rope_theta"]
            llama_frequencies = theta ** -(
                torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu") / self.head_dim
            )
        self._frequencies = llama_frequencies
        self._eps = config["rms_norm_eps"]

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepare forward(), after the weights are loaded and on their final device.

        The weights of norms are folded into the matrices that follow them: a frame has many small
        steps, whose cost is the number of operations, on every device.
        """
        self.lm_head.mul_(self.norm.weight)
        self.norm.weight.fill_(1)
        cos, sin = self._rope()
        for layer in self.layers:
            layer.prepare(cos, sin)

    def _rope(self) -> tuple[Tensor, Tensor]:
        """Tables for the n_steps + 1 positions of a frame, [n_steps + 1, head_dim] float32."""
        frequencies = self._frequencies.cpu()
        positions = torch.arange(self.n_steps + 1, dtype=torch.float32, device="cpu")
        angle = torch.outer(positions, frequencies)
        angle = torch.cat((angle, angle), dim=-1).to(self.lm_head.device)
        return angle.cos(), angle.sin()

    def forward(
        self, past_hidden: Tensor, first_embed: Tensor, greedy: Tensor | None, draws: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Predict the residual codes of one frame for every stream.

        Args:
            past_hidden: [n, width], the talker's normalised hidden state that chose code 0.
            first_embed: [n, width], the talker's embedding of code 0.
            greedy: [n] bool, streams that take the argmax; None when all do.
            draws: [n, n_steps] of `draws_of`, for the others; None when all are greedy.
        Returns:
            codes [n, n_steps] int64, and the sum of their embeddings [n, width].
        """
        caches = [layer.new_cache(self.n_steps + 1, past_hidden) for layer in self.layers]
        x = self._narrow(torch.stack((past_hidden, first_embed), dim=1).flatten(0, 1))
        codes, embed_sum, width, at = [], torch.zeros_like(first_embed), 2, 0
        for step in range(self.n_steps):
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cache, at, width)
            at += width
            logits = F.linear(_unit(x[width - 1 :: width], self._eps), self.lm_head[step])
            draw = None if draws is None else draws[:, step]
            code = self.sampler.choose(logits, self._temperature, greedy, draw)
            embed = F.embedding(code, self.codec_embedding[step])
            codes.append(code)
            embed_sum = embed_sum + embed
            x, width = self._narrow(embed), 1
        return torch.stack(codes, dim=1), embed_sum

    def _narrow(self, x: Tensor) -> Tensor:
        """[n, width] -> [n, hidden]"""
        return x if self.small_to_mtp_projection is None else self.small_to_mtp_projection(x)

    def embed_frames(self, codes: Tensor) -> Tensor:
        """Sum of residual embeddings of known frames: codes [n, n_steps] -> [n, width]."""
        group = torch.arange(self.n_steps, device=codes.device)
        return self.codec_embedding[group, codes].sum(dim=1)


def traced(predictor: CodePredictor) -> Callable[..., tuple[Tensor, Tensor]]:
    """`predictor` as a function of the same arguments that runs without Python.

    On a CPU a frame of a thousand small operations costs more in Python than in arithmetic; this
    has the role of a captured graph on a GPU. Later changes of the predictor have no effect on
    it. Takes about a second.
    """
    like = predictor.lm_head
    hidden = like.new_zeros(2, predictor.codec_embedding.shape[-1])
    greedy = torch.zeros(2, dtype=torch.bool, device=like.device)
    draws = torch.zeros(2, predictor.n_steps, dtype=torch.int64, device=like.device)
    with torch.no_grad():
        sampled = _frozen(predictor, (hidden, hidden, greedy, draws))
        all_greedy = _frozen(_Greedy(predictor).eval(), (hidden, hidden))

    def predict(
        past_hidden: Tensor, first_embed: Tensor, greedy: Tensor | None, draws: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if draws is None:
            return all_greedy(past_hidden, first_embed)
        return sampled(past_hidden, first_embed, greedy, draws)

    return predict


class _Greedy(nn.Module):
    def __init__(self, predictor: CodePredictor):
        super().__init__()
        self.predictor = predictor

    def forward(self, past_hidden: Tensor, first_embed: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictor(past_hidden, first_embed, None, None)


def _frozen(module: nn.Module, example: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        # The tracer warns that the size of the vocabulary becomes a constant, which is intended.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        made = torch.jit.freeze(torch.jit.trace(module.eval(), example, check_trace=False))
    for _ in range(2):
        made(*example)  # the first calls optimise it
    return made


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], head_dim: int, *, norms_qk: bool):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = head_dim
        eps, bias = config["rms_norm_eps"], config.get("attention_bias", False)
        self._eps = eps
        n_qkv = (self.heads + 2 * self.kv_heads) * head_dim
        self.qkv_proj = nn.Linear(hidden, n_qkv, bias=bias)
        self.o_proj = nn.Linear(self.heads * head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps) if norms_qk else None
        self.k_norm = nn.RMSNorm(head_dim, eps=eps) if norms_qk else None
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def prepare(self, cos: Tensor, sin: Tensor) -> None:
        """Fold norms into matrices and tables. cos, sin: [positions, head_dim] float32."""
        for norm, follower in (
            (self.input_layernorm, self.qkv_proj),
            (self.post_attention_layernorm, self.gate_up_proj),
        ):
            follower.weight.mul_(norm.weight)
            norm.weight.fill_(1)
        scale = self._qk_scale(cos)
        low, high = scale.chunk(2, dim=-1)
        dtype = self.qkv_proj.weight.dtype
        # RoPE mixes the halves of a head: sin carries the sign, and the other half's norm weight.
        self.cos = (cos.unsqueeze(1) * scale).to(dtype)
        self.sin = (sin.unsqueeze(1) * torch.cat((-high, low), dim=-1)).to(dtype)

    def _qk_scale(self, like: Tensor) -> Tensor:
        """[heads + kv_heads, head_dim] float32, the weights of the norms."""
        if self.q_norm is None or self.k_norm is None:
            return like.new_ones(self.heads + self.kv_heads, self.head_dim)
        norms = [self.q_norm.weight] * self.heads + [self.k_norm.weight] * self.kv_heads
        return torch.stack(norms).float()

    def new_cache(self, length: int, like: Tensor) -> Tensor:
        """[n, length, keys and values, head_dim]"""
        return like.new_empty(like.shape[0], length, 2 * self.kv_heads, self.head_dim)

    def forward(self, x: Tensor, cache: Tensor, at: int, width: int) -> Tensor:
        """x: [n * width, hidden], the positions from `at` on of every stream."""
        n, n_qk, end = cache.shape[0], self.heads + self.kv_heads, at + width
        qkv = F.linear(_unit(x, self._eps), self.qkv_proj.weight, self.qkv_proj.bias)
        qkv = qkv.view(n, width, -1, self.head_dim)
        qk = qkv[:, :, :n_qk]
        if self.q_norm is not None:
            qk = _unit(qk, self._eps)
        low, high = qk.chunk(2, dim=-1)
        swapped = torch.cat((high, low), dim=-1)
        qk = torch.addcmul(qk * self.cos[at:end], swapped, self.sin[at:end])
        cache[:, at:end, : self.kv_heads] = qk[:, :, self.heads :]
        cache[:, at:end, self.kv_heads :] = qkv[:, :, n_qk:]
        keys, values = cache[:, :end].transpose(1, 2).chunk(2, dim=1)
        queries = qk[:, :, : self.heads].transpose(1, 2)
        # Only the first call has two positions and needs the causal mask.
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=width > 1, enable_gqa=True
        )
        mixed = mixed.transpose(1, 2).reshape(n * width, -1)
        x = x + F.linear(mixed, self.o_proj.weight, self.o_proj.bias)
        gate, up = F.linear(_unit(x, self._eps), self.gate_up_proj.weight).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down_proj.weight)


def _unit(x: Tensor, eps: float) -> Tensor:
    """RMS norm without weights, over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)
