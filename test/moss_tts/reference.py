"""MOSS-TTS (delay) and MOSS-Audio-Tokenizer's decoder, restated in PyTorch.

Source: OpenMOSS/MOSS-TTS, moss_tts_delay/modeling_moss_tts.py and its audio tokenizer, which need
another transformers and torchaudio. Written for clarity: one sequence, everything at once.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model


class MossTTS(nn.Module):
    """Names as in the published checkpoint. Channel 0 is text, the others are books."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.settings = config
        qwen3 = Qwen3Config(**config["language_config"])
        size = config["audio_vocab_size"] + 1
        sizes = [qwen3.vocab_size, *[size] * config["n_vq"]]
        width = qwen3.hidden_size
        self.language_model = Qwen3Model(qwen3)
        self.emb_ext = nn.ModuleList(nn.Embedding(size, width) for size in sizes[1:])
        self.lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)

    @torch.no_grad()
    def generate(
        self, text_ids: list[int], most_steps: int, said: tuple[int, Tensor] | None = None
    ) -> Tensor:
        """[n_steps, 1 + n_vq] of the likeliest ids behind a prompt that ends with audio_start.

        said: place and codes [n, n_vq] of a recording in the prompt.
        """
        config, n_vq = self.settings, self.settings["n_vq"]
        pad = config["audio_pad_code"]
        slots = [config[f"audio_assistant_{name}_slot_token_id"] for name in ("gen", "delay")]
        steps = torch.tensor([[token, *[pad] * n_vq] for token in text_ids])
        n_prompt = len(steps)
        if said is not None:
            at, codes = said
            delayed_codes = steps[at : at + len(codes) + n_vq - 1, 1:]
            for book in range(n_vq):
                delayed_codes[book : book + len(codes), book] = codes[:, book]
        audio_length = 1  # with audio_start
        delayed: int | None = None  # steps since the first delay slot
        while len(steps) - n_prompt < most_steps:
            logits = self._logits(steps)
            if delayed == n_vq:
                text = config["audio_end_token_id"]
            elif delayed is not None:
                text = slots[1]
            else:
                allowed = slots[:1] if len(steps) == n_prompt else slots
                text = max(allowed, key=lambda token: float(logits[0][token]))
            row = [text]
            for book in range(n_vq):
                is_begun = audio_length > book
                is_over = delayed is not None and book < delayed
                code = int(logits[book + 1][:pad].argmax())
                row.append(code if is_begun and not is_over else pad)
            steps = torch.cat((steps, torch.tensor([row])))
            if text == config["audio_end_token_id"]:
                break
            audio_length += 1
            if delayed is not None or text == slots[1]:
                delayed = (delayed or 0) + 1
        return steps[n_prompt:]

    def _logits(self, steps: Tensor) -> list[Tensor]:
        embeds = self.language_model.embed_tokens(steps[:, 0])
        for book, table in enumerate(self.emb_ext):
            embeds = embeds + table(steps[:, book + 1])
        hidden = self.language_model(inputs_embeds=embeds[None]).last_hidden_state[0, -1]
        return [head(hidden) for head in self.lm_heads]


class Codec(nn.Module):
    """By the published names."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        books = config["quantizer_kwargs"]
        self.quantizer = nn.Module()
        self.quantizer.quantizers = nn.ModuleList(
            _Book(books) for _ in range(books["num_quantizers"])
        )
        self.quantizer.input_proj = _normed_conv(books["input_dim"], books["rvq_dim"])
        self.quantizer.output_proj = _normed_conv(books["rvq_dim"], books["output_dim"])
        rate = float(config["sampling_rate"])
        inner: list[nn.Module] = []
        for stage in config["encoder_kwargs"]:
            if stage["module_type"] == "Transformer":
                window = int(rate * config["causal_transformer_context_duration"])
                inner.append(_Transformer(stage, window))
            else:
                inner.append(_Patch(stage["patch_size"], joins=True))
                rate /= stage["patch_size"]
        self.encoder = nn.ModuleList(inner)
        rate = config["sampling_rate"] / config["downsample_rate"]
        stages: list[nn.Module] = []
        for stage in config["decoder_kwargs"]:
            if stage["module_type"] == "Transformer":
                window = int(rate * config["causal_transformer_context_duration"])
                stages.append(_Transformer(stage, window))
            else:
                stages.append(_Patch(stage["patch_size"]))
                rate *= stage["patch_size"]
        self.decoder = nn.ModuleList(stages)

    @torch.no_grad()
    def encode(self, samples: Tensor, n_books: int) -> Tensor:
        """[n_frames, n_books] of whole frames [n_samples]."""
        x = samples[:, None]
        for stage in self.encoder:
            x = stage(x)
        rest, codes = self.quantizer.input_proj(x.T[None])[0], []
        for book in list(self.quantizer.quantizers)[:n_books]:
            codes.append(book.nearest(rest))
            rest = rest - book(codes[-1])
        return torch.stack(codes, dim=1)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """[n_samples] of codes [n_frames, n_books], of the first books."""
        x = sum(
            book(of_book) for book, of_book in zip(self.quantizer.quantizers, codes.T, strict=False)
        )
        x = self.quantizer.output_proj(x[None])[0].T  # [n_frames, width]
        for stage in self.decoder:
            x = stage(x)
        return x[:, 0]


def _normed_conv(width_in: int, width_out: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Conv1d(width_in, width_out, 1))


class _Book(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.codebook = nn.Embedding(config["codebook_size"], config["codebook_dim"])
        self.in_proj = _normed_conv(config["rvq_dim"], config["codebook_dim"])
        self.out_proj = _normed_conv(config["codebook_dim"], config["rvq_dim"])

    def forward(self, codes: Tensor) -> Tensor:
        return self.out_proj(self.codebook(codes).T[None])[0]

    def nearest(self, x: Tensor) -> Tensor:
        """Codes [n] of x [width, n]."""
        inner = F.normalize(self.in_proj(x[None])[0].T)
        table = F.normalize(self.codebook.weight)
        return torch.cdist(inner, table).argmin(dim=1)


class _Patch(nn.Module):
    def __init__(self, size: int, joins: bool = False):
        super().__init__()
        self._size, self._joins = size, joins

    def forward(self, x: Tensor) -> Tensor:
        n, width = x.shape
        if self._joins:
            return x.view(n // self._size, self._size, width).transpose(1, 2).flatten(1)
        patches = x.view(n, width // self._size, self._size).transpose(1, 2)
        return patches.reshape(n * self._size, -1)


class _Transformer(nn.Module):
    def __init__(self, config: dict[str, Any], window: int):
        super().__init__()
        width = config["d_model"]
        widths = config["input_dimension"], config["output_dimension"]
        self.input_proj = self._projection(widths[0], width)
        self.output_proj = self._projection(width, widths[1])
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(
            _Layer(config, window) for _ in range(config["num_layers"])
        )

    @staticmethod
    def _projection(width_in: int, width_out: int) -> nn.Module:
        return nn.Identity() if width_in == width_out else nn.Linear(width_in, width_out, False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_proj(x)
        for layer in self.transformer.layers:
            x = layer(x)
        return self.output_proj(x)


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], window: int):
        super().__init__()
        width, inner = config["d_model"], config["dim_feedforward"]
        self._n_heads, self._window, self._period = (
            config["num_heads"],
            window,
            config["max_period"],
        )
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.self_attn = nn.Module()
        self.self_attn.in_projs = nn.ModuleList([nn.Linear(width, 3 * width, bias=False)])
        self.self_attn.out_projs = nn.ModuleList([nn.Linear(width, width, bias=False)])
        self.linear1 = nn.Linear(width, inner, bias=False)
        self.linear2 = nn.Linear(inner, width, bias=False)
        self.layer_scale_1, self.layer_scale_2 = _Scale(width), _Scale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale_1.scale * self._attended(self.norm1(x))
        inner = self.linear2(F.gelu(self.linear1(self.norm2(x))))
        return x + self.layer_scale_2.scale * inner

    def _attended(self, x: Tensor) -> Tensor:
        qkv = self.self_attn.in_projs[0](x).view(len(x), 3, self._n_heads, -1)
        query, key, value = qkv.permute(1, 2, 0, 3)
        query, key = self._rotated(query), self._rotated(key)
        at = torch.arange(len(x))
        delta = at[:, None] - at
        seen = (delta >= 0) & (delta < self._window)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.self_attn.out_projs[0](found.transpose(0, 1).flatten(1))

    def _rotated(self, x: Tensor) -> Tensor:
        """x: [n_heads, n, width]; adjacent pairs rotate."""
        half = x.shape[2] // 2
        exponent = -math.log(self._period) / half * torch.arange(half, dtype=x.dtype)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * exponent.exp()
        real, imaginary = x.unflatten(2, (half, 2)).unbind(3)
        cos, sin = angle.cos(), angle.sin()
        turned = real * cos - imaginary * sin, real * sin + imaginary * cos
        return torch.stack(turned, dim=3).flatten(2)


class _Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
