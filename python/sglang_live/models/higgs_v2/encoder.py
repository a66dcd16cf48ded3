"""The encoder of the codec beside a Higgs checkpoint: sound of a speaker to codes.

A HuBERT hears what is said, a DAC how it sounds; their states are quantised together.
Source: HiggsAudioV2TokenizerModel.encode (transformers), which needs torchaudio to resample.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.dac.modeling_dac import DacEncoder
from transformers.models.higgs_audio_v2_tokenizer.configuration_higgs_audio_v2_tokenizer import (
    HiggsAudioV2TokenizerConfig,
)
from transformers.models.hubert.modeling_hubert import HubertModel

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.snac import folded
from sglang_live.models.family import read_json
from sglang_live.models.higgs_v2.family import CODEC_FOLDER
from sglang_live.models.speech_lm.checkpoint import read_tensors

# Of the sound on both sides, before HuBERT.
_SEMANTIC_PAD = 160
# A convolution's weight as transformers parametrises it, by the names of older checkpoints.
_OLD_NAMES = {".weight_g": ".original0", ".weight_v": ".original1"}
# Of torchaudio's resampling by default: zeros of the filter on each side, and its cut-off.
_ZEROS, _ROLLOFF = 6, 0.99


class HiggsEncoder:
    """
    Attributes:
        sample_rate_hz, samples_per_frame: of the sound.
    """

    def __init__(self, checkpoint: Path):
        """Raises BadInputError if a weight is missing."""
        folder = checkpoint / CODEC_FOLDER
        self._config = config = HiggsAudioV2TokenizerConfig(**read_json(folder / "config.json"))
        self.sample_rate_hz, self.samples_per_frame = config.sample_rate, config.hop_length
        with torch.device("meta"):
            self._hubert = HubertModel(config.semantic_model_config).eval()
            self._dac = DacEncoder(config.acoustic_model_config).eval()
        self._semantic = read_tensors(folder, "encoder_semantic.")
        self._books = read_tensors(folder, "quantizer.quantizers.")
        self._fc = read_tensors(folder, "fc.")
        hubert = {
            _named(name): tensor for name, tensor in read_tensors(folder, "semantic_model.").items()
        }
        hubert.pop("masked_spec_embed", None)  # of its training
        _fill(self._hubert, hubert, folder)
        _fill(self._dac, folded(read_tensors(folder, "acoustic_encoder.")), folder)
        if not (self._semantic and self._books and self._fc):
            raise BadInputError(f"{folder}: its weights lack those that encode a recording")

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """[n_frames, n_books] int64 of [n_frames * samples_per_frame] float32 on the CPU."""
        config = self._config
        low = resampled(samples, config.sample_rate, config.semantic_sample_rate)
        padded = F.pad(low[None], (_SEMANTIC_PAD, _SEMANTIC_PAD))
        states = self._hubert(padded, output_hidden_states=True).hidden_states
        heard = torch.stack(states).mean(dim=0)[:, :: config.semantic_downsample_factor]
        semantic = self._encoded(heard.transpose(1, 2))
        both = torch.cat((self._dac(samples[None, None]), semantic), dim=1).transpose(1, 2)
        return self._quantised(F.linear(both, self._fc["weight"], self._fc["bias"])[0])

    def _encoded(self, x: Tensor) -> Tensor:
        config, tensors = self._config, self._semantic
        x = F.conv1d(x, tensors["conv.weight"], padding=config.kernel_size // 2)
        for block, stride in enumerate(config.strides):
            name = f"conv_blocks.{block}"
            for unit, dilation in enumerate(config.block_dilations):
                weight = tensors[f"{name}.res_units.{unit}.conv1.weight"]
                padding = (config.unit_kernel_size - 1) // 2 * dilation
                y = F.conv1d(F.elu(x), weight, padding=padding, dilation=dilation)
                x = x + F.conv1d(F.elu(y), tensors[f"{name}.res_units.{unit}.conv2.weight"])
            weight, bias = tensors[f"{name}.conv.weight"], tensors[f"{name}.conv.bias"]
            x = F.conv1d(x, weight, bias, stride=stride, padding=(weight.shape[2] - 1) // 2)
        return x

    def _quantised(self, rest: Tensor) -> Tensor:
        """Each book has the code nearest to what the books before it have left of `rest`."""
        codes = []
        for book in range(self._config.num_quantizers):
            inner, outer = (f"{book}.project_{way}" for way in ("in", "out"))
            x = F.linear(rest, self._books[f"{inner}.weight"], self._books[f"{inner}.bias"])
            table = self._books[f"{book}.codebook.embed"]
            distance = x.pow(2).sum(1, keepdim=True) - 2 * x @ table.t() + table.pow(2).sum(1)
            codes.append(distance.argmin(dim=1))
            weight, bias = self._books[f"{outer}.weight"], self._books[f"{outer}.bias"]
            rest = rest - F.linear(table[codes[-1]], weight, bias)
        return torch.stack(codes, dim=1)


def resampled(samples: Tensor, from_hz: int, to_hz: int) -> Tensor:
    """[n] float32 as torchaudio.functional.resample makes it (sinc, Hann window)."""
    if from_hz == to_hz:
        return samples
    divisor = math.gcd(from_hz, to_hz)
    old, new = from_hz // divisor, to_hz // divisor
    cutoff = min(old, new) * _ROLLOFF
    width = math.ceil(_ZEROS * old / cutoff)
    at = torch.arange(-width, width + old, device="cpu").float() / old
    phase = torch.arange(0, -new, -1, device="cpu").float() / new
    time = ((phase[:, None] + at) * cutoff).clamp(-_ZEROS, _ZEROS)
    window = (time * math.pi / _ZEROS / 2).cos().square()
    kernel = torch.sinc(time) * window * cutoff / old
    padded = F.pad(samples, (width, width + old))
    found = F.conv1d(padded[None, None], kernel[:, None], stride=old)[0].t().flatten()
    return found[: math.ceil(new * len(samples) / old)]


def _named(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + ".parametrizations.weight" + new
    return name


def _fill(module: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise BadInputError(f"{folder} encodes no recordings: {error}") from error
