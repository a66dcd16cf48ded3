"""Parts of a checkpoint directory: a view with the talker alone, and weights for a module.

SGLang sizes its KV pool and chooses the model class by config.json. The view has a config of the
talker alone and links to its shards.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from sglang_live.errors import BadInputError


def view_of_talker(
    checkpoint: Path,
    cache: Path,
    config_of: Callable[[dict[str, Any]], dict[str, Any]],
    prefixes: tuple[str, ...],
    files: tuple[str, ...] = (),
) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race.

    Args:
        config_of: the talker's config from the checkpoint's.
        prefixes: of the names of its weights.
        files: other ones that it has, if the checkpoint has them.
    """
    checkpoint = checkpoint.resolve()
    file = checkpoint / "config.json"
    config = config_of(json.loads(file.read_text("utf-8")))

    def write(view: Path) -> None:
        _write_config(view, config)
        _link_weights(checkpoint, view, prefixes)
        for name in files:
            if (checkpoint / name).is_file():
                (view / name).symlink_to(checkpoint / name)

    return _view(f"{checkpoint}:{file.stat().st_mtime_ns}:{json.dumps(config)}", cache, write)


def view_of_file(weights: Path, cache: Path, config: Mapping[str, Any]) -> Path:
    """As view_of_talker, of one file of weights and a config that no file has."""
    # A hub keeps files under other names, to which these are links.
    weights = weights.parent.resolve() / weights.name

    def write(view: Path) -> None:
        _write_config(view, config)
        (view / weights.name).symlink_to(weights)

    return _view(f"{weights}:{json.dumps(config)}", cache, write)


def _view(stamp: str, cache: Path, write: Callable[[Path], None]) -> Path:
    view = cache / f"talker-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if (view / "config.json").exists():
        return view
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="view-", dir=cache))
    try:
        write(scratch)
        os.replace(scratch, view)
    except OSError:
        if not (view / "config.json").exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return view


def _write_config(view: Path, config: Mapping[str, Any]) -> None:
    (view / "config.json").write_text(json.dumps(config, indent=2), "utf-8")


def shards_with(checkpoint: Path, prefixes: tuple[str, ...]) -> dict[str, str]:
    """Weight name -> shard file name, for the weights whose name starts with one of prefixes."""
    index = _index(checkpoint)
    if index.exists():
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
    else:
        weight_map = {}
        for shard in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(shard, "pt") as tensors:
                weight_map.update(dict.fromkeys(tensors.keys(), shard.name))
    return {name: shard for name, shard in weight_map.items() if name.startswith(prefixes)}


def _index(checkpoint: Path) -> Path:
    """The index of its shards, if it has one. Some checkpoints have weights in another layout
    under the usual names, and name the index of those for transformers."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    name = config.get("transformers_weights", "model.safetensors.index.json")
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".index.json"):
        raise BadInputError(
            f"{checkpoint}: transformers_weights is {name!r}: not an index in this directory"
        )
    return checkpoint / name


def _link_weights(checkpoint: Path, view: Path, prefixes: tuple[str, ...]) -> None:
    weight_map = shards_with(checkpoint, prefixes)
    index = {"metadata": {}, "weight_map": weight_map}
    (view / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    for shard in set(weight_map.values()):
        (view / shard).symlink_to(checkpoint / shard)


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
    tensors = read_tensors(path, prefix)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _check(wanted, found, path, prefix)
    module.load_state_dict(tensors, assign=True)


def read_tensors(path: Path, prefix: str, *, keeps: bool = False) -> dict[str, Tensor]:
    """The tensors whose name begins with prefix, without it unless keeps, in float32."""
    tensors = {}
    for file, names in _files(path, prefix).items():
        with safe_open(path / file, framework="pt", device="cpu") as weights:
            for name in weights.keys() if names is None else names:
                if name.startswith(prefix):
                    short = name if keeps else name.removeprefix(prefix)
                    tensors[short] = weights.get_tensor(name).float()
    return tensors


def _files(path: Path, prefix: str) -> dict[str, list[str] | None]:
    """The files to open, and the names of each; None: the names are read from the file."""
    index = _index(path)
    if not index.exists():
        return {_SINGLE: None}
    files = defaultdict(list)
    for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items():
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
