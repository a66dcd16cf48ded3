"""GLM-4-Voice's speech tokenizer: the first half of Whisper's encoder, with a code every 80 ms.

Convolutions see the past only; attention sees the past, and the block of four seconds that a place
is in. Four states are averaged, and the nearest row of a table is the code.
Source: GLM-4-Voice, arXiv:2412.02612 (speech_tokenizer/modeling_whisper.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.family import read_json
from sglang_live.models.speech import Pcm
from sglang_live.models.speech_lm.checkpoint import read_tensors

# Longer speech is heard in parts of this length.
PART_SAMPLES = 30 * INPUT_RATE_HZ
_STRIDE = 2  # of the second convolution


class VqEncoder(nn.Module):
    """
    Args:
        config: of the published checkpoint.
    Raises:
        BadInputError: it has another form than the published one.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        wanted = {"encoder_causal_convolution": True, "quantize_causal_encoder": False}
        for name, value in wanted.items():
            if config.get(name) is not value:
                raise BadInputError(f"speech tokenizer: {name} has to be {value}")
        n_layers = config["quantize_position"]
        if config["pooling_position"] != n_layers or config["pooling_type"] != "avg":
            raise BadInputError("speech tokenizer: it has to average before it looks up codes")
        width, self.n_pooled = config["d_model"], config["pooling_kernel_size"]
        self.block = config["quantize_causal_block_size"]
        self.conv1 = nn.Conv1d(config["num_mel_bins"], width, 3)
        self.conv2 = nn.Conv1d(width, width, 3, stride=_STRIDE)
        self.embed_positions = nn.Embedding(config["max_source_positions"], width)
        layer = WhisperConfig(
            d_model=width,
            encoder_attention_heads=config["encoder_attention_heads"],
            encoder_ffn_dim=config["encoder_ffn_dim"],
            activation_function=config.get("activation_function", "gelu"),
            attn_implementation="sdpa",
        )
        self.layers = nn.ModuleList(WhisperEncoderLayer(layer) for _ in range(n_layers))
        self.codebook = nn.Embedding(config["quantize_vocab_size"], width)

    @classmethod
    def load(cls, path: Path) -> "VqEncoder":
        """Raises BadInputError: config.json has another form, or weights are missing."""
        module = cls(read_json(path / "config.json")).eval()
        tensors, wanted = read_tensors(path, ""), module.state_dict()
        # The published file has more: what training needed, and the other half.
        if missing := [name for name in wanted if name not in tensors]:
            raise BadInputError(f"{path} lacks the weights {', '.join(missing[:3])}")
        module.load_state_dict({name: tensors[name] for name in wanted})
        return module

    @torch.no_grad()
    def forward(self, mels: Tensor, is_sound: Tensor) -> Tensor:
        """
        Args:
            mels: [n, n_mels, n_frames], a multiple of what a code takes.
            is_sound: [n, n_frames] bool; False: padding.
        Returns:
            Codes [n, n_frames / (2 * n_pooled)].
        """
        states = F.gelu(self.conv1(F.pad(mels, (2, 0))))
        states = F.gelu(self.conv2(F.pad(states, (2, 0)))).transpose(1, 2)
        states = states + self.embed_positions.weight[: states.shape[1]]
        at = torch.arange(states.shape[1], device=states.device)
        sees = (at[:, None] >= at) | (at[:, None] // self.block == at // self.block)
        mask = sees & is_sound[:, None, None, ::_STRIDE]
        for layer in self.layers:
            states = layer(states, mask)
        pooled = F.avg_pool1d(states.transpose(1, 2), self.n_pooled).transpose(1, 2)
        table = self.codebook.weight
        flat = pooled.reshape(-1, table.shape[1])
        squares = table.square().sum(dim=1) + flat.square().sum(dim=1, keepdim=True)
        nearest = torch.addmm(squares, flat, table.T, alpha=-2.0).argmin(dim=1)
        return nearest.view(pooled.shape[:2])


class GlmEars:
    """Ears (models/own_voice.py).

    Args:
        path: directory of the speech tokenizer.
        first_code, begin, end: ids of the first code, and around a recording.
    """

    def __init__(self, path: Path, first_code: int, begin: int, end: int):
        self._device = torch.device("cpu")
        self._encoder = VqEncoder.load(path)
        self._features = WhisperFeatureExtractor.from_pretrained(path)
        self._first, self._begin, self._end = first_code, begin, end

    def move(self, device: str) -> None:
        self._device = torch.device(device)
        self._encoder.to(self._device)

    def ids(self, pcm: Pcm) -> Sequence[int]:
        codes = self.codes(pcm)
        return [self._begin, *(self._first + code for code in codes), self._end] if codes else []

    def codes(self, pcm: Pcm) -> list[int]:
        """One for each 80 ms, the last one begun."""
        if not len(pcm):
            return []
        parts = [pcm[at : at + PART_SAMPLES] for at in range(0, len(pcm), PART_SAMPLES)]
        n_frames = _STRIDE * self._encoder.n_pooled
        found = self._features(
            [part.astype("float32") / 32_768 for part in parts],
            sampling_rate=INPUT_RATE_HZ,
            return_attention_mask=True,
            return_tensors="pt",
            padding="longest",
            pad_to_multiple_of=n_frames * self._features.hop_length,
        )
        is_sound = found.attention_mask.bool()
        codes = self._encoder(
            found.input_features.to(self._device), is_sound.to(self._device)
        ).cpu()
        ids: list[int] = codes[is_sound[:, ::n_frames]].tolist()
        return ids
