"""Loading of the vocoder alone from a Qwen3-Omni checkpoint directory."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

_PREFIX = "code2wav."
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_code2wav(path: str | Path) -> Qwen3OmniMoeCode2Wav:
    """Build transformers' vocoder from a checkpoint, on the CPU, in float32.

    Its non-persistent buffers stay on the meta device: the module carries weights and config,
    and cannot be called.

    Args:
        path: directory with config.json and one or several .safetensors files.
    Raises:
        ValueError: if config.json has no code2wav_config, or the `code2wav.` tensors are not
            exactly those of this config, by name and shape.
    """
    path = Path(path)
    config = json.loads((path / "config.json").read_text())
    if "code2wav_config" not in config:
        raise ValueError(f"{path / 'config.json'} has no code2wav_config: not a talking checkpoint")
    with torch.device("meta"):  # random initialisation of the real vocoder takes seconds
        module = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**config["code2wav_config"]))
    wanted = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    tensors = _read_tensors(path)
    _check(wanted, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, path)
    module.load_state_dict(tensors, assign=True)
    return module.eval()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    tensors = {}
    for file, names in _files(path).items():
        with safe_open(path / file, framework="pt", device="cpu") as weights:
            for name in weights.keys() if names is None else names:
                if name.startswith(_PREFIX):
                    tensors[name.removeprefix(_PREFIX)] = weights.get_tensor(name).float()
    return tensors


def _files(path: Path) -> dict[str, list[str] | None]:
    """The files to open, and the names of each; None: the names are read from the file."""
    if not (path / _INDEX).exists():
        return {_SINGLE: None}
    files = defaultdict(list)
    for name, file in json.loads((path / _INDEX).read_text())["weight_map"].items():
        if name.startswith(_PREFIX):
            files[file].append(name)
    return dict(files)


def _check(wanted: dict[str, tuple], found: dict[str, tuple], path: Path) -> None:
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        raise ValueError(
            f"{path}: {len(missing)} code2wav tensors missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{path}: code2wav.{name} is {found[name]}, config has {shape}")
