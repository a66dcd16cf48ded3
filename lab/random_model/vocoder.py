"""A vocoder with random weights, in which every path contributes."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from lab.random_model.folder import Facts
from sglang_live.models.family import read_json

# About -16 dB of full scale, as loud as speech.
_RMS = 0.15
_LEVEL_FRAMES = 8


def load_random(_load: Callable[..., nn.Module], path: str | Path) -> Qwen3OmniMoeCode2Wav:
    """Around load_code2wav: weights of a folder of a random model."""
    config = read_json(Path(path) / "config.json")["code2wav_config"]
    return random_code2wav(Qwen3OmniMoeCode2WavConfig(**config), Facts.of(Path(path)).seed)


@torch.no_grad()
def random_code2wav(config: Qwen3OmniMoeCode2WavConfig, seed: int) -> Qwen3OmniMoeCode2Wav:
    """On the CPU in float32, at a speech-like level."""
    torch.manual_seed(seed)
    module = Qwen3OmniMoeCode2Wav(config).eval()
    for name, weight in module.named_parameters():
        if "embedding" in name:
            weight.normal_(0, config.num_quantizers**0.5)  # the model takes a mean
        elif weight.dim() > 1:
            # Snake activations amplify; a smaller gain keeps the stack at unit size.
            gain = 0.7 if name.startswith("decoder") else 1.0
            weight.normal_(0, gain * weight[0].numel() ** -0.5)
        elif name.endswith(("gamma", "scale", "norm.weight")):
            weight.uniform_(0.3, 1.2)
        else:
            weight.normal_(0, 0.1)
    last = module.decoder[-1].conv
    last.bias.zero_()
    last.weight.mul_(1e-3)  # below the clamp while the level is measured
    codes = torch.randint(config.codebook_size, (1, config.num_quantizers, _LEVEL_FRAMES))
    last.weight.mul_(_RMS / module(codes).std())
    return module
