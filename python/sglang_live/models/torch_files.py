"""Files that torch has saved, which checkpoints have beside safetensors."""

import pickle
from pathlib import Path
from typing import Any

import torch

from sglang_live.errors import BadInputError


def read_torch_file(file: Path) -> dict[str, Any]:
    """Its entries, on the CPU; nothing of it is executed.

    Raises:
        BadInputError: the file is missing, cannot be read, or has another form.
    """
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    # What torch raises depends on where the file is cut.
    except (
        OSError,
        RuntimeError,
        EOFError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        raise BadInputError(f"cannot read {file}: {error}") from error
