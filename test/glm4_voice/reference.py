"""What GLM-4-Voice computes: its language model as transformers' GLM, which has the same layers
under other names; its speech tokenizer and its tokenizer restated."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import regex
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import GlmConfig, GlmForCausalLM, WhisperFeatureExtractor

from sglang_live.core import HistoryItem
from sglang_live.models.glm4_voice.ears import GlmEars
from sglang_live.models.glm4_voice.family import AUDIO, TOKENIZER, GlmVoiceSpec
from sglang_live.models.glm4_voice.parts import GlmPrompt
from sglang_live.models.glm4_voice.tokenizer import fast_tokenizer
from sglang_live.models.prompt import Markup, Piece, Words
from test.glm4_voice import checkpoint as tiny

_PATTERN = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def language_model(path: Path) -> GlmForCausalLM:
    config = GlmConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=tiny.HIDDEN,
        intermediate_size=tiny.FFN,
        num_hidden_layers=tiny.LAYERS,
        num_attention_heads=tiny.HEADS,
        num_key_value_heads=tiny.GROUPS,
        head_dim=tiny.HIDDEN // tiny.HEADS,
        max_position_embeddings=2048,
        rms_norm_eps=1.5625e-07,
        pad_token_id=0,
        eos_token_id=[],
    )
    found = load_file(path / "model.safetensors")
    sizes = [n * tiny.HIDDEN // tiny.HEADS for n in (tiny.HEADS, tiny.GROUPS, tiny.GROUPS)]
    weights = {
        "model.embed_tokens.weight": found["transformer.embedding.word_embeddings.weight"],
        "model.norm.weight": found["transformer.encoder.final_layernorm.weight"],
        "lm_head.weight": found["transformer.output_layer.weight"],
    }
    for n in range(tiny.LAYERS):
        old, new = f"transformer.encoder.layers.{n}", f"model.layers.{n}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{new}.{norm}.weight"] = found[f"{old}.{norm}.weight"]
        for kind in ("weight", "bias"):
            parts = found[f"{old}.self_attention.query_key_value.{kind}"].split(sizes)
            weights |= {
                f"{new}.self_attn.{p}_proj.{kind}": w for p, w in zip("qkv", parts, strict=True)
            }
        weights[f"{new}.self_attn.o_proj.weight"] = found[f"{old}.self_attention.dense.weight"]
        weights[f"{new}.mlp.gate_up_proj.weight"] = found[f"{old}.mlp.dense_h_to_4h.weight"]
        weights[f"{new}.mlp.down_proj.weight"] = found[f"{old}.mlp.dense_4h_to_h.weight"]
    model = GlmForCausalLM(config).eval()
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def greedy(model: GlmForCausalLM, ids: list[int], n: int) -> list[int]:
    found = model.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False)
    return found[0, len(ids) :].tolist()


def encode(text: str, ranks: Mapping[bytes, int]) -> list[int]:
    """As tiktoken does without control tokens: in each word, the pair of the lowest rank first."""
    ids = []
    for word in _PATTERN.findall(text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            if not pairs or min(pairs) == len(ranks):
                break
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def codes(path: Path, pcm: np.ndarray) -> list[int]:
    """Of one recording of up to 30 s, without padding beyond its last code."""
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    n = -(-len(pcm) // 1280)
    mels = extractor(
        pcm / 32_768, sampling_rate=16_000, return_tensors="pt", padding="longest",
        pad_to_multiple_of=1280, return_attention_mask=True,
    )  # fmt: skip
    weights = load_file(path / "model.safetensors")
    is_sound = mels.attention_mask[0, ::2].bool()
    x = _causal(mels.input_features[0], weights, "conv1", 1)
    x = _causal(x, weights, "conv2", 2).T
    x = x + weights["embed_positions.weight"][: len(x)]
    n_places, block = len(x), tiny.ENCODER["quantize_causal_block_size"]
    mask = torch.zeros(n_places, n_places, dtype=torch.bool)
    for q in range(n_places):
        mask[q, : max(q + 1, (q // block + 1) * block)] = True
    mask &= is_sound
    for layer in range(tiny.ENCODER["quantize_position"]):
        x = _layer(x, mask, weights, f"layers.{layer}")
    pooled = x.view(-1, 4, x.shape[1]).mean(1)
    return torch.cdist(pooled, weights["codebook.weight"]).argmin(1)[:n].tolist()


def _causal(x: Tensor, weights: dict[str, Tensor], name: str, stride: int) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return F.gelu(F.conv1d(F.pad(x[None], (2, 0)), weight, bias, stride))[0]


def _layer(x: Tensor, mask: Tensor, weights: dict[str, Tensor], at: str) -> Tensor:
    def linear(y: Tensor, name: str) -> Tensor:
        return F.linear(y, weights[f"{at}.{name}.weight"], weights.get(f"{at}.{name}.bias"))

    def norm(y: Tensor, name: str) -> Tensor:
        return F.layer_norm(
            y, y.shape[-1:], weights[f"{at}.{name}.weight"], weights[f"{at}.{name}.bias"]
        )

    y, heads = norm(x, "self_attn_layer_norm"), tiny.ENCODER["encoder_attention_heads"]
    q, k, v = (
        linear(y, f"self_attn.{p}_proj").view(len(x), heads, -1).transpose(0, 1) for p in "qkv"
    )
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(x.shape)
    x = x + linear(y, "self_attn.out_proj")
    return x + linear(F.gelu(linear(norm(x, "final_layer_norm"), "fc1")), "fc2")


class Model:
    """The published model, as transformers and the restated tokenizers have it."""

    def __init__(self, path: Path, instructions: str):
        spec = GlmVoiceSpec.load(path)
        self.prompt = GlmPrompt(spec, fast_tokenizer(path))
        begin, end = (spec.special[name] for name in AUDIO)
        self.ears = GlmEars(path / TOKENIZER, spec.first_code, begin, end)
        self._model = language_model(path)
        self._instructions = instructions

    def ids(self, *history: HistoryItem | np.ndarray) -> list[int]:
        """Of a prompt; recordings are a user's."""
        pieces = self.prompt.header(self._instructions)
        for item in history:
            if isinstance(item, np.ndarray):
                heard = tuple(self.ears.ids(item))
                item = HistoryItem(key="heard", role="user", parts=(), token_ids=heard)
            pieces += self.prompt.item(item)
        return self._ids([*pieces, *self.prompt.open_response()])

    def response(self, ids: list[int], n: int) -> list[int]:
        return greedy(self._model, ids, n)

    def _ids(self, pieces: list[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            assert isinstance(piece, Markup | Words)
            markup = isinstance(piece, Markup)
            ids += self.prompt.markup_ids(piece.text) if markup else piece.token_ids
        return ids
