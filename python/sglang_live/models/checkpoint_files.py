"""Integrity check of a checkpoint's files, by headers and lengths, without reading the weights.

The layout is that of safetensors: eight bytes with the length of a JSON header, the header with
the offsets of every tensor, then the tensors.
"""

import json
from pathlib import Path

from sglang_live.errors import BadInputError

# A header has a few hundred bytes per tensor; safetensors itself rejects larger ones.
_MAX_HEADER_BYTES = 100_000_000


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
    if not weights and not any(path.glob("*.bin")):
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
        return json.loads(file.read_text())
    except OSError as error:
        raise BadInputError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{file} is no JSON: {error}") from error
