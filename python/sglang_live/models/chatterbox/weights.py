"""Parts of a file of Chatterbox's weights."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_live.errors import BadInputError


def read_part(file: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with prefix, without it. Raises BadInputError if the file is
    missing or broken."""
    try:
        with safe_open(file, "pt") as tensors:
            found = tensors.keys()
            names = [name for name in found if name.startswith(prefix)]
            return {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"cannot read {file}: {error}") from error
