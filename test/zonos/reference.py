"""Zonos v0.1 (transformer), restated in PyTorch.

Source: Zyphra/Zonos (zonos/model.py, backbone/_torch.py, conditioning.py, sampling.py), which has
no package. Written for clarity: one text, both prompts as a batch, everything at once.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_BOOKS, EOS, MASKED = 9, 1024, 1025


class Zonos(nn.Module):
    """Names as in the published checkpoint."""

    def __init__(self, config: dict[str, Any], n_phonemes: int):
        super().__init__()
        self.backbone = nn.Module()
        settings, width = config["backbone"], config["backbone"]["d_model"]
        self.backbone.layers = nn.ModuleList(_Layer(settings) for _ in range(settings["n_layer"]))
        self.backbone.norm_f = nn.LayerNorm(width, eps=settings["norm_epsilon"])
        self.embeddings = nn.ModuleList(nn.Embedding(1026, width) for _ in range(N_BOOKS))
        self.heads = nn.ModuleList(nn.Linear(width, 1025, bias=False) for _ in range(N_BOOKS))
        self.prefix_conditioner = _Prefix(config["prefix_conditioner"], width, n_phonemes)

    @torch.no_grad()
    def generate(self, conditions: dict[str, Any], most_frames: int, guidance: float) -> Tensor:
        """[n_frames, N_BOOKS] of the likeliest codes."""
        prefix = self.prefix_conditioner
        untold = {name: conditions[name] for name in prefix.required}
        both = torch.stack([prefix(conditions), prefix(untold)])
        columns = [torch.full((N_BOOKS,), MASKED)]
        left: int | None = None  # steps that remain
        while left != 0 and len(columns) - 1 < most_frames + N_BOOKS - 1:
            logits = self._logits(both, columns, guidance)
            if len(columns) > 1:
                logits[1:, EOS] = -torch.inf
                logits = _penalised(logits, torch.stack(columns[-2:]))
            drawn = logits.argmax(dim=1)
            if len(columns) > 1 and drawn[0] == EOS and left is None:
                left = N_BOOKS
            if left is not None:
                drawn[: N_BOOKS - left] = MASKED
                drawn[N_BOOKS - left] = EOS
                left -= 1
            drawn[len(columns) :] = MASKED  # the books that have not begun
            columns.append(drawn)
        steps = torch.stack(columns[1:])
        n_frames = len(steps) - N_BOOKS + 1 - (left == 0)
        books = [steps[book : n_frames + book, book] for book in range(N_BOOKS)]
        codes = torch.stack(books, dim=1)
        return codes.masked_fill(codes >= EOS, 0)

    def _logits(self, both: Tensor, columns: list[Tensor], guidance: float) -> Tensor:
        codes = torch.stack(columns)
        spoken = sum(table(codes[:, n]) for n, table in enumerate(self.embeddings))
        hidden = torch.cat((both, spoken.expand(2, -1, -1)), dim=1)
        for layer in self.backbone.layers:
            hidden = layer(hidden)
        told, untold = self.backbone.norm_f(hidden)[:, -1]
        of_both = [torch.stack([head(state) for head in self.heads]) for state in (told, untold)]
        return of_both[1] + (of_both[0] - of_both[1]) * guidance


def _penalised(logits: Tensor, columns: Tensor, penalty: float = 3.0) -> Tensor:
    """columns: [n, N_BOOKS], the newest ones. A code counts as often as it is there."""
    factors = torch.ones_like(logits)
    for column in columns:
        for book, code in enumerate(column.tolist()):
            if code < EOS:
                factors[book, code] *= penalty
    return torch.where(logits <= 0, logits * factors, logits / factors)


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        width, eps, inner = (
            config[name] for name in ("d_model", "norm_epsilon", "attn_mlp_d_intermediate")
        )
        self._n, self._n_kv = (config["attn_cfg"][x] for x in ("num_heads", "num_heads_kv"))
        self._size = width // self._n
        self.norm, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.mixer, self.mlp = nn.Module(), nn.Module()
        joined = (self._n + 2 * self._n_kv) * self._size
        self.mixer.in_proj = nn.Linear(width, joined, bias=False)
        self.mixer.out_proj = nn.Linear(width, width, bias=False)
        self.mlp.fc1 = nn.Linear(width, 2 * inner, bias=False)
        self.mlp.fc2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attended(self.norm(x))
        value, gate = self.mlp.fc1(self.norm2(x)).chunk(2, dim=-1)
        return x + self.mlp.fc2(value * F.silu(gate))

    def _attended(self, x: Tensor) -> Tensor:
        sizes = [self._n * self._size, self._n_kv * self._size, self._n_kv * self._size]
        parts = self.mixer.in_proj(x).split(sizes, dim=-1)
        query, key, value = (p.unflatten(2, (-1, self._size)).transpose(1, 2) for p in parts)
        found = F.scaled_dot_product_attention(
            _rotated(query), _rotated(key), value, is_causal=True, enable_gqa=True
        )
        return self.mixer.out_proj(found.transpose(1, 2).flatten(2))


def _rotated(x: Tensor) -> Tensor:
    """x: [..., n, width]; adjacent pairs rotate."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * frequency
    real, imaginary = x.unflatten(-1, (half, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    turned = real * cos - imaginary * sin, real * sin + imaginary * cos
    return torch.stack(turned, dim=-1).flatten(-2)


class _Prefix(nn.Module):
    def __init__(self, config: dict[str, Any], width: int, n_phonemes: int):
        super().__init__()
        conditioners = [_Conditioner(one, width, n_phonemes) for one in config["conditioners"]]
        self.conditioners = nn.ModuleList(conditioners)
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, width) if config["projection"] == "linear" else None
        self.required = [one.name for one in conditioners if one.uncond_vector is None]

    def forward(self, conditions: dict[str, Any]) -> Tensor:
        rows = torch.cat([one(conditions.get(one.name)) for one in self.conditioners])
        return self.norm(rows if self.project is None else self.project(rows))


class _Conditioner(nn.Module):
    def __init__(self, config: dict[str, Any], width: int, n_phonemes: int):
        super().__init__()
        self.name, self._type = config["name"], config["type"]
        self._low, self._high = config.get("min_val", 0), config.get("max_val", 1)
        if self._type == "EspeakPhonemeConditioner":
            self.phoneme_embedder = nn.Embedding(n_phonemes, width)
        elif self._type == "FourierConditioner":
            shape = (width // 2, config.get("input_dim", 1))
            self.register_buffer("weight", torch.randn(shape))
        elif self._type == "IntegerConditioner":
            self.int_embedder = nn.Embedding(self._high - self._low + 1, width)
        self.project = None
        if config.get("projection") == "linear":
            self.project = nn.Linear(config.get("cond_dim", width), width)
        self.uncond_vector = None
        if config.get("uncond_type") == "learned":
            self.uncond_vector = nn.Parameter(torch.zeros(width))

    def forward(self, told: Any) -> Tensor:
        if told is None:
            assert self.uncond_vector is not None
            return self.uncond_vector[None]
        if self._type == "EspeakPhonemeConditioner":
            rows = self.phoneme_embedder(torch.tensor(told))
        elif self._type == "FourierConditioner":
            scaled = (torch.tensor([told], dtype=torch.float32) - self._low) / (
                self._high - self._low
            )
            angle = 2 * math.pi * scaled @ self.weight.T
            rows = torch.cat((angle.cos(), angle.sin()), dim=1)
        elif self._type == "IntegerConditioner":
            rows = self.int_embedder(torch.tensor([told[0] - self._low]))
        else:
            rows = torch.tensor([told], dtype=torch.float32)
        return rows if self.project is None else self.project(rows)
