"""Integrity check of a checkpoint's files, by headers and lengths, without reading the weights.

The layout is that of safetensors: eight bytes with the length of a JSON header, the header with
the offsets of every tensor, then the tensors.
"""

import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.models.family import checkpoint_config, claiming_family

# A header has a few hundred bytes per tensor; safetensors itself rejects larger ones.
_MAX_HEADER_BYTES = 100_000_000
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EXPECTED = "--model-path is the directory of a checkpoint, with config.json and *.safetensors"
_MOST_NAMES = 5  # of files, in an error


def find_checkpoint(given: str, built_in: Sequence[str]) -> Path:
    """The directory of a checkpoint as typed.

    Args:
        built_in: names that may stand in its place.
    Raises:
        BadInputError: there is none; says what is there instead, and how to get one.
    """
    path = Path(os.path.expanduser(given))
    if given and is_checkpoint(path):
        return path
    or_name = f"{_EXPECTED}, or {', '.join(built_in)}"
    if not given:
        raise BadInputError(f"--model-path is empty: {or_name}")
    if path.is_file():
        raise BadInputError(f"{given} is a file: {or_name}")
    if not path.exists():
        if near := difflib.get_close_matches(given.lower(), built_in, n=1, cutoff=0.7):
            raise BadInputError(f"there is no model {given}; did you mean {near[0]}?")
        if _HUB_NAME.fullmatch(given):
            raise BadInputError(
                f"there is no directory {given}, and the server downloads no checkpoints: "
                f"get this one with `hf download {given} --local-dir DIR`, then give "
                f"--model-path DIR; without a checkpoint: {', '.join(built_in)}"
            )
        raise BadInputError(f"there is no directory {path}: {or_name}")
    raise BadInputError(f"{path.resolve()} is no checkpoint: {_found_in(path)}; {or_name}")


def is_checkpoint(path: Path) -> bool:
    """Whether it has a config.json, or files that a family knows without it."""
    if (path / "config.json").is_file():
        return True
    try:
        return path.is_dir() and claiming_family(checkpoint_config(path)) is not None
    except BadInputError:
        return False  # _found_in says why


def _found_in(path: Path) -> str:
    """What is in a directory without a checkpoint."""
    try:
        names = sorted(file.name for file in path.iterdir())
        # The hub's cache, or a folder of checkpoints.
        inner = sorted(file.parent for file in path.glob("*/config.json"))
        inner += sorted(file.parent for file in path.glob("snapshots/*/config.json"))
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if inner:
        return f"it has no config.json, but {inner[0]} has one"
    if not names:
        return "it is empty"
    if "adapter_config.json" in names:
        return "it is an adapter (LoRA), which must be merged into its base model first"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{gguf[0]} is GGUF, which is not served; get the model's safetensors"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"it has no config.json, but {', '.join(names[:_MOST_NAMES])}{more}"


def check_checkpoint(path: Path) -> None:
    """
    Raises:
        BadInputError: names the file that is missing, truncated or malformed.
    """
    if not path.is_dir():
        raise BadInputError(f"--model-path: there is no directory {path}")
    for file in sorted(path.glob("*.json")):
        document = _read_json(file)
        if file.name.endswith(".safetensors.index.json"):
            _check_shards(file, document)
    weights = sorted(path.glob("*.safetensors"))
    if not weights and not any(path.glob("*.bin")) and not any(path.glob("*.pt")):
        raise BadInputError(f"{path} has no weights: no *.safetensors in it")
    for file in weights:
        _check_weights(file)


def _check_shards(index: Path, document: object) -> None:
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict):
        raise BadInputError(f"{index} has no weight_map")
    for name in sorted(set(names.values())):
        if not (index.parent / name).is_file():
            raise BadInputError(f"{index.parent / name} is missing: {index.name} names it")


def _check_weights(file: Path) -> None:
    try:
        n_bytes = file.stat().st_size
        with file.open("rb") as opened:
            n_header = int.from_bytes(opened.read(8), "little")
            if n_bytes < 8 or n_header > min(_MAX_HEADER_BYTES, n_bytes - 8):
                raise BadInputError(f"{file} is no safetensors file, or cut short")
            header = json.loads(opened.read(n_header))
        ends = [
            tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"
        ]
    except OSError as error:
        raise BadInputError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadInputError(f"{file} has a broken header: {error}") from error
    n_expected = 8 + n_header + max(ends, default=0)
    if n_bytes != n_expected:
        raise BadInputError(f"{file} has {n_bytes} bytes, its header says {n_expected}")


def _read_json(file: Path) -> object:
    try:
        return json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise BadInputError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{file} is no JSON: {error}") from error
