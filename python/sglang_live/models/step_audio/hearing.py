"""How Step-Audio 2 hears: Whisper's encoder, a state every 40 ms, and an adapter that makes one for
the language model of two.

Source: stepfun-ai/Step-Audio-2-mini (modeling_step_audio_2.py; utils.py: log_mel_spectrogram).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_live.models import log_mel

# Longer speech is heard in parts of this length.
PART_S = 25
_PADDED_SAMPLES = 479
# With fewer a clip has no token.
_LEAST_SAMPLES = 5 * log_mel.HOP
# Frames that are there for the convolutions, and heard as silence.
_PADDED_FRAMES = 2
_ADAPTER_WIDTH = 2048


class LogMel(log_mel.LogMel):
    """With silence behind a clip."""

    def __call__(self, samples: Tensor) -> Tensor:
        n = max(_PADDED_SAMPLES, _LEAST_SAMPLES - len(samples))
        return super().__call__(F.pad(samples, (0, n)))


def n_tokens(n_frames: int) -> int:
    """Of the language model, for a clip of this number of frames of mel."""
    n_states = (n_frames - _PADDED_FRAMES + 1) // 2 // 2
    return (n_states - 1) // 2 + 1


class Hearing(nn.Module):
    """The names of its parameters are those of the checkpoint.

    config: audio_encoder_config.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self.encoder, self.adapter = _Encoder(config), _Adapter(config)

    def forward(self, mels: Tensor) -> Tensor:
        """[n_tokens, width of the language model] of a clip, [n_mels, n_frames]."""
        heard: Tensor = self.adapter(self.encoder(mels[None]))[0]
        return heard[: n_tokens(mels.shape[1])]


class _Encoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        width = config["n_audio_state"]
        self.conv1 = nn.Conv1d(config["n_mels"], width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.positional_embedding = nn.Embedding(config["n_audio_ctx"], width)
        self.blocks = nn.ModuleList(
            _Block(width, config["n_audio_head"]) for _ in range(config["n_audio_layer"])
        )
        self.after_norm = nn.LayerNorm(width)

    def forward(self, mels: Tensor) -> Tensor:
        """[n, n_states, width] of [n, n_mels, n_frames] of one length."""
        n_frames = mels.shape[2]
        x = F.gelu(self.conv2(F.gelu(self.conv1(mels)))).transpose(1, 2)
        x = x + self.positional_embedding.weight[: x.shape[1]]
        # A state is of two frames; the last one is hidden with the second of them.
        seconds = torch.arange(n_frames, device=x.device)[(n_frames + 1) % 2 :: 2]
        seen = (seconds < n_frames - _PADDED_FRAMES).expand(len(x), 1, 1, -1)
        for block in self.blocks:
            x = block(x, seen)
        normed: Tensor = self.after_norm(F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2))
        return normed


class _Block(nn.Module):
    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.attn = _Attention(width, n_heads)
        self.attn_ln, self.mlp_ln = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attn(self.attn_ln(x), seen)
        heard: Tensor = x + self.mlp(self.mlp_ln(x))
        return heard


class _Attention(nn.Module):
    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self._n_heads = n_heads
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(2, (self._n_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed


class _Adapter(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        width, kernel, stride = (
            config[name] for name in ("n_audio_state", "kernel_size", "adapter_stride")
        )
        self.conv = nn.Conv1d(width, width, kernel, stride, padding=1)
        self.linear1 = nn.Linear(width, _ADAPTER_WIDTH)
        self.linear2 = nn.Linear(_ADAPTER_WIDTH, config["llm_dim"])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        heard: Tensor = self.linear2(F.relu(self.linear1(x)))
        return heard
