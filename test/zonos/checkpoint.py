"""A tiny random Zonos in the published layout, its codec, and their reference.

Its weights are made so that, as a trained model, it ends its pieces: what the embedding of some
codes says of the end, no layer changes, and the head of the first book reads it.
"""

import copy
import json
import math
import os
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import soxr
import torch
from safetensors.torch import save_file
from transformers import DacConfig, DacModel

from sglang_live.models.voice_files import voice_files
from sglang_live.models.zonos.family import CODEC_FOLDER, SPEAKER_FILES, SPEAKER_FOLDER, VOICE
from sglang_live.models.zonos.parts import N_PHONEMES, ZonosTalker
from sglang_live.models.zonos.speaker import embeddings_of
from test.zonos.reference import EOS, N_BOOKS, Zonos

HIDDEN, CODES = 64, 1024
SAMPLES_PER_FRAME = 1  # of those that are resampled a piece has any number
N_IDS = N_BOOKS * (CODES + 2)
# A dimension that says that this is the last code; in embedding and head what no other outweighs.
_LAST, _CLEAR = 0, 8.0
_LEARNED = {"uncond_type": "learned"}
CONFIG = {
    "backbone": {
        "d_model": HIDDEN,
        "d_intermediate": 0,
        "attn_mlp_d_intermediate": 96,
        "n_layer": 2,
        "ssm_cfg": {},
        "attn_layer_idx": [0, 1],
        "attn_cfg": {"causal": True, "num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 16},
        "rms_norm": False,
        "residual_in_fp32": False,
        "norm_epsilon": 1e-5,
    },
    # The published conditions with smaller sizes, and one that cannot be left out.
    "prefix_conditioner": {
        "conditioners": [
            {"type": "EspeakPhonemeConditioner", "name": "espeak"},
            {
                "type": "PassthroughConditioner",
                "name": "speaker",
                "cond_dim": 8,
                "projection": "linear",
            }
            | _LEARNED,
            {"type": "FourierConditioner", "name": "emotion", "input_dim": 8} | _LEARNED,
            {"type": "FourierConditioner", "name": "fmax", "min_val": 0, "max_val": 24_000}
            | _LEARNED,
            {"type": "FourierConditioner", "name": "pitch_std", "min_val": 0, "max_val": 400},
            {"type": "IntegerConditioner", "name": "language_id", "min_val": -1, "max_val": 126}
            | _LEARNED,
        ],
        "projection": "linear",
    },
    "eos_token_id": EOS,
    "masked_token_id": EOS + 1,
    "dtype": "float32",
}
# As make_cond_dict of the reference, for a text in English without a speaker.
_EMOTION = [0.3077, *[0.0256] * 5, 0.2564, 0.3077]
CONDITIONS = {
    "emotion": [value / sum(_EMOTION) for value in _EMOTION],
    "fmax": [22_050.0],
    "pitch_std": [20.0],
    "language_id": [24],
}
DAC = {
    "sampling_rate": 44_100,
    "n_codebooks": N_BOOKS,
    "codebook_size": CODES,
    "codebook_dim": 8,
    "hidden_size": 16,
    "encoder_hidden_size": 4,
    "decoder_hidden_size": 32,
    "downsampling_ratios": [2, 4, 8, 8],
    "upsampling_ratios": [8, 8, 4, 2],
}


@cache
def model(end_every: int) -> Zonos:
    torch.manual_seed(5)
    made = Zonos(CONFIG, N_PHONEMES).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.uniform_(0.7, 1.3, generator=rng)
            elif weight.dim() == 1:
                weight.normal_(0, 0.3, generator=rng)
            else:
                scale = 1.0 if "embed" in name else 2.0 * weight.shape[-1] ** -0.5
                weight.normal_(0, scale, generator=rng)
        for table in made.embeddings:
            table.weight[:, _LAST] = -_CLEAR / N_BOOKS
        made.embeddings[0].weight[2:CODES:end_every, _LAST] = _CLEAR
        for head in made.heads:
            head.weight[EOS] = 0.0
            head.weight[:, _LAST] = 0.0
        made.heads[0].weight[EOS, _LAST] = 4 * _CLEAR
        for layer in made.backbone.layers:
            layer.mixer.out_proj.weight[_LAST] = 0.0
            layer.mlp.fc2.weight[_LAST] = 0.0
    return made


def build(path: Path, *, end_every: int = 128, **changes) -> Path:
    """Returns the checkpoint's directory.

    end_every: codes of the first book up to one that ends a piece.
    changes: of config.json.
    """
    path.mkdir(exist_ok=True)
    save_file(dict(model(end_every).state_dict()), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    codec().save_pretrained(path / CODEC_FOLDER)
    (path / SPEAKER_FOLDER).mkdir(exist_ok=True)
    for name, tensors in zip(SPEAKER_FILES, speaker_encoder(), strict=True):
        torch.save(tensors, path / SPEAKER_FOLDER / name)
    return path


def speaker_encoder() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of the network and of the discriminant by the published names, with fewer layers and
    channels."""
    rng = torch.Generator().manual_seed(7)
    width, out, n_values = 4, 12, 8
    found: dict[str, torch.Tensor] = {}

    def conv(name: str, *shape: int) -> None:
        found[f"{name}.weight"] = (
            torch.randn(shape, generator=rng) * (2 / math.prod(shape[1:])) ** 0.5
        )

    def norm(name: str, n: int) -> None:
        for kind, low in (("weight", 0.7), ("bias", -0.2), ("running_mean", -0.2)):
            found[f"{name}.{kind}"] = low + 0.5 * torch.rand(n, generator=rng)
        found[f"{name}.running_var"] = 0.7 + 0.6 * torch.rand(n, generator=rng)

    conv("front.conv1", width, 1, 3, 3)
    norm("front.bn1", width)
    before = width
    for layer, n_blocks in enumerate((2, 1, 2, 1)):
        for n in range(n_blocks):
            name, after = f"front.layer{layer + 1}.{n}", width * 2**layer
            conv(f"{name}.conv1", after, before, 3, 3)
            conv(f"{name}.conv2", after, after, 3, 3)
            norm(f"{name}.bn1", after)
            norm(f"{name}.bn2", after)
            if before != after:
                conv(f"{name}.downsample.0", after, before, 1, 1)
                norm(f"{name}.downsample.1", after)
            before = after
    n_states = before * 10
    for name, shape in (
        ("pooling.attention.0", (128, n_states, 1)),
        ("pooling.attention.3", (n_states, 128, 1)),
        ("bottleneck", (out, 2 * n_states)),
    ):
        conv(name, *shape)
        found[f"{name}.bias"] = 0.1 * torch.randn(shape[0], generator=rng)
    norm("pooling.attention.2", 128)
    discriminant = {"weight": torch.randn(n_values, out, generator=rng) / out**0.5}
    return found, discriminant | {"bias": 0.1 * torch.randn(n_values, generator=rng)}


def recordings(folder: Path) -> Path:
    """A directory with one recording."""
    sound = 0.2 * np.random.default_rng(3).standard_normal(30_000)
    sf.write(folder / "anna.wav", sound, 16_000, subtype="FLOAT")
    return folder


@cache
def codec() -> DacModel:
    """A random codec in which every path matters; its wave has an rms of about 0.2."""
    torch.manual_seed(0)
    module = DacModel(DacConfig(**DAC)).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.state_dict().items():
            if name.endswith("alpha"):
                weight.uniform_(0.3, 1.5, generator=rng)
            elif name.startswith("decoder") and weight.dim() == 3:
                weight.normal_(0, 1.2 * weight[0].numel() ** -0.5, generator=rng)
            elif name.startswith(("decoder", "quantizer")):
                weight.normal_(0, 0.3, generator=rng)
        for _ in range(4):  # what a tanh bounds
            sound = torch.atanh(decoded(random_codes(12), module=module) * 0.999)
            for last in (module.decoder.conv2.weight, module.decoder.conv2.bias):
                last.mul_(0.2 / sound.std())
    return module


def random_codes(n_frames: int, seed: int = 1) -> torch.Tensor:
    """[n_frames, N_BOOKS]."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, CODES, (n_frames, N_BOOKS), generator=rng)


def decoded(
    codes: torch.Tensor, dtype: torch.dtype = torch.float32, module: DacModel | None = None
) -> torch.Tensor:
    """[n_samples] at 44.1 kHz of codes [n_frames, N_BOOKS], by the reference."""
    module = copy.deepcopy(module or codec()).to(dtype)
    with torch.no_grad():
        latents, *_ = module.quantizer.from_codes(codes.T[None])
        return module.decoder(latents).flatten()


def heard(codes: torch.Tensor) -> torch.Tensor:
    """As decoded, at the server's rate."""
    return torch.from_numpy(soxr.resample(decoded(codes).numpy(), 44_100, 24_000))


class Reference:
    """The checkpoint restated, without what a talker in an engine adds."""

    def __init__(self, path: Path, voices: Path | None = None, end_every: int = 128):
        self.talker = ZonosTalker(path, voices)
        self._speakers: dict[str, torch.Tensor] = {}
        if voices is not None:
            files = voice_files(voices)
            found = embeddings_of(path, [*files.values()])
            self._speakers = dict(zip(files, found, strict=True))
        self.model = model(end_every)

    def piece(self, text: str, most_frames: int, voice: str = VOICE) -> np.ndarray:
        """[n_frames, N_BOOKS]."""
        ids = [token - N_IDS for token in self.talker.prompt(voice, text)]
        phonemes = [token for token in ids if token < N_PHONEMES]
        told = CONDITIONS | {"espeak": phonemes}
        if voice in self._speakers:
            told["speaker"] = self._speakers[voice].tolist()
        return self.model.generate(told, most_frames, guidance=2.0).numpy()


# Answers as the program does, with the letters of the clause.
_ESPEAK = """#!/bin/sh
sed -e 's/[.,?!]//g'
"""


@pytest.fixture(scope="session")
def espeak(tmp_path_factory) -> Iterator[None]:
    """A program of its name is found first in PATH: no test needs the real one."""
    program = tmp_path_factory.mktemp("bin") / "espeak-ng"
    program.write_text(_ESPEAK)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        yield
