"""Weights of a part of a checkpoint directory, into a module of the same names."""

import json
from collections import defaultdict
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def fill(module: nn.Module, path: Path, prefix: str) -> None:
    """Assign the tensors whose name begins with prefix, in float32, to a module.

    Args:
        module: its state dict has the names without the prefix.
        path: directory with one or several .safetensors files.
    Raises:
        ValueError: the tensors are not exactly those of the module, by name and shape.
    """
    wanted = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    tensors = _read_tensors(path, prefix)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _check(wanted, found, path, prefix)
    module.load_state_dict(tensors, assign=True)


def _read_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    tensors = {}
    for file, names in _files(path, prefix).items():
        with safe_open(path / file, framework="pt", device="cpu") as weights:
            for name in weights.keys() if names is None else names:
                if name.startswith(prefix):
                    tensors[name.removeprefix(prefix)] = weights.get_tensor(name).float()
    return tensors


def _files(path: Path, prefix: str) -> dict[str, list[str] | None]:
    """The files to open, and the names of each; None: the names are read from the file."""
    if not (path / _INDEX).exists():
        return {_SINGLE: None}
    files = defaultdict(list)
    for name, file in json.loads((path / _INDEX).read_text("utf-8"))["weight_map"].items():
        if name.startswith(prefix):
            files[file].append(name)
    return dict(files)


def _check(wanted: dict[str, tuple], found: dict[str, tuple], path: Path, prefix: str) -> None:
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        raise ValueError(
            f"{path}: {len(missing)} {prefix[:-1]} tensors missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{path}: {prefix}{name} is {found[name]}, config has {shape}")
