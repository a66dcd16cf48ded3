"""A tiny random Mimi in the published layout, in transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import MimiConfig, MimiModel

CODEBOOK_SIZE, N_QUANTIZERS, SAMPLES_PER_FRAME = 64, 4, 1920
# kyutai/mimi with fewer channels and layers; the window is the published one.
CONFIG = dict(
    model_type="mimi",
    hidden_size=32,
    num_filters=4,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    codebook_size=CODEBOOK_SIZE,
    codebook_dim=16,
    vector_quantization_hidden_dimension=16,
    num_quantizers=N_QUANTIZERS,
    upsample_groups=32,
    sliding_window=250,
)


def tiny_module(**changes) -> MimiModel:
    """A random Mimi in which every path matters; its wave has an rms of about 0.2."""
    torch.manual_seed(0)
    module = MimiModel(MimiConfig.from_dict(CONFIG | changes)).eval()
    randomise(module)
    return module


@torch.no_grad()
def randomise(module: MimiModel) -> None:
    rng = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        if name.endswith("scale"):
            weight.uniform_(0.3, 0.8, generator=rng)
        elif name.endswith("norm.weight"):
            weight.uniform_(0.7, 1.3, generator=rng)
        elif name.endswith("bias"):
            weight.normal_(0, 0.05, generator=rng)
        elif "_proj." in name and "attn" in name:
            weight.normal_(0, 0.2, generator=rng)  # attention that prefers some positions
    for name, table in module.named_buffers():
        if name.endswith("embed_sum"):
            table.normal_(0, 1, generator=rng)
        elif name.endswith("cluster_usage"):
            table.uniform_(0.5, 2, generator=rng)
            table[0] = 0.0  # an entry that training never used
    last = module.decoder.layers[-1].conv
    wave = decoded(module, random_codes(60, n_quantizers=module.config.num_quantizers))
    last.weight.mul_(0.2 / wave.std())
    last.bias.mul_(0.2 / wave.std())


def random_codes(n_frames: int, seed: int = 1, *, n_quantizers: int = N_QUANTIZERS) -> torch.Tensor:
    """[n_frames, n_quantizers] int64."""
    rng = torch.Generator().manual_seed(seed)
    # An entry that was never used is far away, and so would be the wave.
    return torch.randint(1, CODEBOOK_SIZE, (n_frames, n_quantizers), generator=rng)


def random_sound(n_frames: int, seed: int = 1) -> torch.Tensor:
    """[n_frames * SAMPLES_PER_FRAME] float32."""
    rng = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(n_frames * SAMPLES_PER_FRAME, generator=rng)


def in_float64() -> MimiModel:
    """As tiny_module()."""
    module = tiny_module().double()
    for layer in module.modules():
        if hasattr(layer, "_embed"):
            layer._embed = None  # computed in float32
    return module


@torch.inference_mode()
def decoded(module: MimiModel, codes: torch.Tensor) -> torch.Tensor:
    """The wave of all frames at once."""
    return module.decode(codes.T[None]).audio_values[0, 0]


@torch.inference_mode()
def encoded(module: MimiModel, samples: torch.Tensor) -> torch.Tensor:
    """[n_frames, n_quantizers], of all samples at once."""
    return module.encode(samples[None, None]).audio_codes[0].T


def save_checkpoint(path: Path, module: MimiModel, **changes) -> Path:
    """As it is published."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    weights = {name: weight.contiguous() for name, weight in module.state_dict().items()}
    save_file(weights, path / "model.safetensors")
    return path
