"""Metadata and tensors of a GGUF file, with errors that name the file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError

Value = TypeVar("Value")
Floats = npt.NDArray[np.float32]


class GgufFile:
    """
    Raises:
        BadInputError: the file is not GGUF, or is cut.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path):
        self._path = path
        try:
            self._reader = gguf.GGUFReader(path)
        # What the reader raises depends on where the file ends.
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise BadInputError(f"{path} is not a GGUF file, or is cut: {error}") from error

    def error(self, fault: str) -> BadInputError:
        return BadInputError(f"{self._path}: {fault}")

    def value(self, key: str, kind: type[Value]) -> Value:
        """Raises BadInputError if there is no such value of this type."""
        field = self._reader.get_field(key)
        value = None if field is None else field.contents()
        if type(value) is not kind:
            found = "is missing" if field is None else f"is of type {type(value).__name__}"
            raise self.error(f"{key} {found}; expected: {kind.__name__}")
        return value

    def keys_of(self, prefix: str) -> list[str]:
        return [key for key in self._reader.fields if key.startswith(prefix)]

    def tensor_names(self) -> list[str]:
        return [tensor.name for tensor in self._reader.tensors]

    def tensors(self) -> Iterator[tuple[str, Floats]]:
        """Name and dequantised values of each tensor, rows first; copies, one at a time."""
        for tensor in self._reader.tensors:
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise self.error(
                    f"{tensor.name} is of type {tensor.tensor_type.name}, which is not read"
                ) from error
            yield tensor.name, np.array(values, np.float32)
