"""Records where the scheduler's thread reads tensors, for a test.

On a GPU such a read waits until the device has computed the tensor; on a CPU it costs nothing, and
a tensor of the host looks like one of the device. So every read by this project's code is recorded,
with its function, and the test knows those that read the host.
In: LAB_WAIT_RECORD, a file. Out: lines "<module path> <function> <operator>", each once.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sglang_live
from lab.attachment import around, sglangs_scheduler
from sglang_live.attachment import ATTACH_ENV

WAIT_RECORD_ENV = "LAB_WAIT_RECORD"
_PACKAGE = Path(sglang_live.__file__).parent
# Their result, or its shape, depends on values: CUDA computes them before Python goes on.
_READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "bincount",
    "repeat_interleave",
}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class WaitRecorder(TorchDispatchMode):
    def __init__(self, path: Path):
        super().__init__()
        self._path = path
        self._seen = set[str]()
        self._records = False

    def run_batch(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around Scheduler.run_batch: from the first one on, record in the scheduler's thread."""
        if not self._records:
            self._records = True
            self.__enter__()
        return run(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS or (name in _INDEXED and _has_mask(args)):
            self._record(name)
        return func(*args, **(kwargs or {}))

    def _record(self, operator: str) -> None:
        place = _own_place(sys._getframe(2))
        if place is None:
            return
        line = f"{place} {operator}"
        if line not in self._seen:
            self._seen.add(line)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    masks = (torch.bool, torch.uint8)
    return any(isinstance(index, torch.Tensor) and index.dtype in masks for index in indices)


def _own_place(frame: FrameType | None) -> str | None:
    """Module and function that called torch; None if they are not of this project."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts:
            if not path.is_relative_to(_PACKAGE):
                return None
            return f"{path.relative_to(_PACKAGE).as_posix()} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return None


def environment(path: Path) -> dict[str, str]:
    return {ATTACH_ENV: "lab.recorders.wait_recorder:attach", WAIT_RECORD_ENV: str(path)}


def attach(place: str) -> None:
    if place == "sglang":
        recorder = WaitRecorder(Path(os.environ[WAIT_RECORD_ENV]))
        around(sglangs_scheduler(), "run_batch", recorder.run_batch)
