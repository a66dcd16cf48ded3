"""Weights in a checkpoint of PyTorch's format before 1.6, without torch and without its pickle.

In: a file of torch.save. Out: arrays by name.

The file is five pickles (a number, a version, facts of the machine, the object with references to
storages, the storages' keys), then each storage as its length in elements and its bytes. Of the
pickles only dictionaries and float32 tensors are accepted, so that a changed file runs no code.
"""

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError

Floats = npt.NDArray[np.float32]

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_MOST_FLOATS = 1 << 24


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[str, list[Floats]] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "FloatStorage"): np.float32,
            ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name} is not data of a checkpoint")
        return known[module, name]

    def persistent_load(self, pid: Any) -> list[Floats]:
        """The storage, an empty list until its bytes are read."""
        return self.storages.setdefault(str(pid[2]), [])


class _Tensor:
    """A tensor whose storage is read later."""

    def __init__(
        self, storage: list[Floats], offset: int, shape: tuple[int, ...], *_rest: Any
    ) -> None:
        self._storage, self._offset, self._shape = storage, offset, shape

    def array(self) -> Floats:
        n = int(np.prod(self._shape))
        [floats] = self._storage
        return floats[self._offset : self._offset + n].reshape(self._shape)


def read_weights(path: Path, part: str) -> dict[str, Floats]:
    """The tensors of one dictionary of the checkpoint.

    Raises:
        BadInputError: it is no such file.
    """
    try:
        with path.open("rb") as file:
            return _read(file, part)
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path} is not the checkpoint that is needed: {error}") from error


def _read(file: BinaryIO, part: str) -> dict[str, Floats]:
    if _Reader(file).load() != _MAGIC or _Reader(file).load() != _VERSION:
        raise ValueError("it does not begin as a checkpoint does")
    _Reader(file).load()  # facts of the machine that wrote it
    reader = _Reader(file)
    tensors = reader.load()[part]
    for key in _Reader(file).load():
        n = int(np.frombuffer(file.read(8), "<i8")[0])
        if not 0 <= n <= _MOST_FLOATS:
            raise ValueError(f"a storage of {n} elements")
        floats = np.frombuffer(file.read(4 * n), "<f4")
        if len(floats) < n:
            raise EOFError("it ends within a storage")
        reader.storages.setdefault(str(key), []).append(floats)
    return {name: tensor.array() for name, tensor in tensors.items()}
