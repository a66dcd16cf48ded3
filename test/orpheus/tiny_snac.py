"""A tiny random SNAC in the published layout, in the reference package.

The reference draws its noise anew in each call; here its noise blocks take ours.
"""

import json
from pathlib import Path

import torch
from snac import SNAC

from sglang_live.models.codecs.snac import noise_table

CODEBOOK_SIZE = 64
# hubertsiuzdak/snac_24khz with fewer channels.
CONFIG = dict(
    sampling_rate=24_000,
    encoder_dim=4,
    encoder_rates=[2, 4, 8, 8],
    decoder_dim=32,
    decoder_rates=[8, 8, 4, 2],
    attn_window_size=None,
    codebook_size=CODEBOOK_SIZE,
    codebook_dim=8,
    vq_strides=[4, 2, 1],
    noise=True,
    depthwise=True,
)


def tiny_module(**overrides) -> SNAC:
    """A random SNAC in which every path matters; its wave has an rms of about 0.2."""
    torch.manual_seed(0)
    module = SNAC(**CONFIG | overrides).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("alpha"):
                weight.uniform_(0.3, 1.5, generator=rng)
            elif name.endswith("original0"):
                weight.uniform_(0.5, 1.0, generator=rng)
            else:
                weight.normal_(0, 0.3, generator=rng)
    fix_noise(module)
    with torch.no_grad():
        last = module.decoder.model[-2].parametrizations.weight.original0
        last.mul_(0.2 / torch.atanh(whole_wave(module, random_codes(12)) * 0.999).std())
    return module


def fix_noise(module: SNAC) -> None:
    table = noise_table(torch.device("cpu"), torch.float32)
    for block, layers in enumerate(list(module.decoder.model)[2:-3]):
        noise = layers.block[2]
        if not hasattr(noise, "linear"):
            return
        shift = block * (len(table) // 4)

        def forward(x, noise=noise, shift=shift):
            return x + table[shift : shift + x.shape[2]] * noise.linear(x)

        noise.forward = forward


def random_codes(n_frames: int, seed: int = 1) -> torch.Tensor:
    """[n_frames, 7] int64."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, CODEBOOK_SIZE, (n_frames, 7), generator=rng)


@torch.inference_mode()
def whole_wave(module: SNAC, codes: torch.Tensor) -> torch.Tensor:
    """[n_frames, 7] at once, with the levels as the Orpheus reference takes them apart."""
    levels = [codes[:, at].reshape(1, -1) for at in ([0], [1, 4], [2, 3, 5, 6])]
    return module.decode(levels)[0, 0]


def save_checkpoint(path: Path, module: SNAC, config: dict | None = None, **changes) -> Path:
    """As it is published. A change of None removes a tensor, any other replaces it."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    tensors = module.state_dict() | changes
    tensors = {name: weight for name, weight in tensors.items() if weight is not None}
    torch.save(tensors, path / "pytorch_model.bin")
    return path
