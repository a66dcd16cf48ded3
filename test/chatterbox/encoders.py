"""Tiny random encoders of Chatterbox's voices, by the names of the published files.

encoders.json has their shapes, and what the reference makes of recordings with these weights.
"""

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_live.models.chatterbox.family import SPEAKER_WEIGHTS

FILE = Path(__file__).with_name("encoders.json")
CLARA = "clara"


@cache
def reference() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def weights(part: str) -> dict[str, Tensor]:
    return weights_of(reference()["shapes"][part])


def weights_of(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Each by its name, so that no other changes it."""
    found = {}
    for name, shape in shapes.items():
        rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        kind, is_norm = name.rsplit(".", 1)[-1], len(shape) == 1 and "weight" in name
        if kind == "running_var" or is_norm:
            found[name] = 0.7 + 0.6 * torch.rand(shape, generator=rng)
        elif len(shape) == 1:
            found[name] = 0.2 * torch.randn(shape, generator=rng)
        else:
            n_in = Tensor([shape[1:]]).prod().item()
            found[name] = 1.5 * n_in**-0.5 * torch.randn(shape, generator=rng)
    return found


def decoder_part() -> dict[str, Tensor]:
    """What a decoder's file has of them."""
    s3 = {f"tokenizer.{name}": tensor for name, tensor in weights("s3").items()}
    return s3 | {f"speaker_encoder.{name}": tensor for name, tensor in weights("campplus").items()}


def recordings(folder: Path) -> Path:
    """A directory with one recording, of noise."""
    sound = 0.2 * np.random.default_rng(3).standard_normal(50_000)
    sf.write(folder / f"{CLARA}.wav", sound, 24_000, subtype="FLOAT")
    return folder


def write(path: Path) -> None:
    """What a checkpoint has beside the decoder's file."""
    save_file(weights("ve"), path / SPEAKER_WEIGHTS)
