"""What Step-Audio 2 mini computes: its language model as transformers' Qwen2, its encoder restated.

Source: stepfun-ai/Step-Audio-2-mini (modeling_step_audio_2.py, utils.py).
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LogitsProcessorList,
    Qwen2ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    WhisperFeatureExtractor,
)

from test.step_audio import checkpoint as tiny

# Of Whisper, which has the same.
_FILTERS = torch.tensor(WhisperFeatureExtractor(feature_size=128).mel_filters.T).float()


class Penalty(RepetitionPenaltyLogitsProcessor):
    """SGLang counts a token one step late, where a step is launched before the last one ends."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return super().__call__(input_ids[:, :-1], scores)


class Model:
    def __init__(self, path: Path):
        self.weights = load_file(path / "model.safetensors")
        self.language = Qwen2ForCausalLM(tiny.language_config()).eval()
        names = "model.", "lm_head."
        self.language.load_state_dict(
            {name: w for name, w in self.weights.items() if name.startswith(names)}
        )

    @torch.no_grad()
    def greedy(self, ids: list[int], heard: list[np.ndarray], n: int) -> list[int]:
        """The next n ids; heard: a recording for each run of places in ids. With embeddings in the
        place of ids, the penalty is of the response alone."""
        x = self.language.model.embed_tokens(torch.tensor(ids))
        place = {name: number for number, name in tiny.special().items()}["<audio_patch>"]
        at = [i for i, token in enumerate(ids) if token == place]
        if heard:
            x[at] = torch.cat([self.states(pcm) for pcm in heard])
        found = self.language.generate(
            inputs_embeds=x[None],
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=n,
            do_sample=False,
            logits_processor=LogitsProcessorList([Penalty(1.05)]),
        )
        return found[0].tolist()

    @torch.no_grad()
    def states(self, pcm: np.ndarray) -> Tensor:
        """[n_tokens, HIDDEN] of one recording of up to 25 s."""
        mel = log_mel(torch.tensor(pcm / np.float32(32_768)).float())
        n_frames, known = mel.shape[1], mel.shape[1] - 2
        x = F.gelu(self._conv(mel[None], "encoder.conv1", 1))
        x = F.gelu(self._conv(x, "encoder.conv2", 2))[0].T
        bias = -1e10 * (torch.arange(n_frames) >= known).float()[(n_frames + 1) % 2 :: 2]
        x = x + self.weights["encoder.positional_embedding.weight"][: len(x)]
        for i in range(tiny.ENCODER["n_audio_layer"]):
            x = self._layer(x, bias, f"encoder.blocks.{i}")
        n = (known + 1) // 2 // 2
        x = torch.stack([x[2 * i : 2 * i + 2].mean(0) for i in range(len(x) // 2)])
        x = self._norm(x, "encoder.after_norm")
        x = F.gelu(self._conv(x.T[None], "adapter.conv", 2))[0].T
        x = self._linear(F.relu(self._linear(x, "adapter.linear1")), "adapter.linear2")
        return x[: (n - 1) // 2 + 1]

    def _conv(self, x: Tensor, name: str, stride: int) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.conv1d(x, weight, bias, stride, padding=1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[1:], weight, bias)

    def _layer(self, x: Tensor, bias: Tensor, at: str) -> Tensor:
        heads = tiny.ENCODER["n_audio_head"]
        y = self._norm(x, f"{at}.attn_ln")
        q, k, v = (
            self._linear(y, f"{at}.attn.{name}").view(len(y), heads, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / q.shape[2] ** 0.5 + bias
        y = (scores.softmax(2) @ v).transpose(0, 1).flatten(1)
        x = x + self._linear(y, f"{at}.attn.out")
        inner = F.gelu(self._linear(self._norm(x, f"{at}.mlp_ln"), f"{at}.mlp.0"))
        return x + self._linear(inner, f"{at}.mlp.2")


def log_mel(samples: Tensor) -> Tensor:
    padded = F.pad(samples, (0, 479))
    spectrum = torch.stft(padded, 400, 160, window=torch.hann_window(400), return_complex=True)
    mels = _FILTERS @ spectrum[:, :-1].abs() ** 2
    logs = torch.clamp(mels, min=1e-10).log10()
    return (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0
