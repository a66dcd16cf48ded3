"""Loading of SNAC's decoder from the directory of a checkpoint, as hubertsiuzdak/snac_24khz."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.snac_config import WEIGHTS, SnacConfig

_PARTS = ("decoder.", "quantizer.")
_NORM = ".parametrizations.weight.original"


def load_snac(path: Path) -> tuple[SnacConfig, dict[str, Tensor]]:
    """The config, and the tensors of decoder and quantizers in float32, on the CPU.

    Weights that are stored as norm and direction are put together.

    Raises:
        BadInputError: a file is missing or cannot be read, or it is another kind of SNAC.
    """
    config, file = SnacConfig.load(path), path / WEIGHTS
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise BadInputError(f"cannot read {file}: {error}") from error
    return config, _folded({k: v for k, v in stored.items() if k.startswith(_PARTS)})


def _folded(stored: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors by the names of their layers. torch has had two names for both parts of a weight."""
    tensors: dict[str, Tensor] = {}
    for name, value in stored.items():
        if name.endswith((f"{_NORM}1", ".weight_v")):
            layer, norm_name = _layer_of(name)
            direction, norm = value.float(), stored[norm_name].float()
            length = direction.flatten(1).norm(dim=1).view(norm.shape)
            tensors[f"{layer}.weight"] = direction * (norm / length)
        elif not name.endswith((f"{_NORM}0", ".weight_g")):
            tensors[name] = value.float()
    return tensors


def _layer_of(direction: str) -> tuple[str, str]:
    """The layer whose weight has this direction, and the name of its norm."""
    if direction.endswith(".weight_v"):
        layer = direction.removesuffix(".weight_v")
        return layer, f"{layer}.weight_g"
    layer = direction.removesuffix(f"{_NORM}1")
    return layer, f"{layer}{_NORM}0"
