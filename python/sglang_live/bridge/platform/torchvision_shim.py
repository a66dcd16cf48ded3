"""Lets CPU PyTorch import a torchvision that was built for CUDA.

A registry serves one torchvision per platform, built against CUDA. With CPU PyTorch its compiled
operators cannot load, and its import then fails, because it attaches shape functions to
undeclared operators. transformers imports it for image processors, so without this shim SGLang
does not start on a CPU.

A stage calls `install()` before it imports SGLang. For programs that import SGLang by themselves,
as tests do, scripts/setup.sh writes a `.pth` file that calls it in every Python process of the CPU
environment. Nothing is imported before torchvision is.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# The operators that torchvision touches at import time without checking that they exist.
OPS_TOUCHED_AT_IMPORT = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# torch forgets the declarations when the Library object is collected.
_declared: list[object] = []


class TorchvisionFinder(MetaPathFinder):
    """Declares the operators once, before the other finders search torchvision. Finds no module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_ops()
        return None


def install() -> None:
    """Install the finder in this process. Idempotent."""
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())


def declare_missing_ops() -> None:
    """Declare torchvision's operators unless its compiled ones load."""
    spec = PathFinder.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations or "torchvision" in sys.modules:
        return
    import torch

    if _compiled_ops_load(torch, Path(spec.submodule_search_locations[0])):
        return
    library = torch.library.Library("torchvision", "DEF")
    for signature in OPS_TOUCHED_AT_IMPORT:
        library.define(signature)
    _declared.append(library)


def _compiled_ops_load(torch: ModuleType, package: Path) -> bool:
    # Declaring an operator twice is an error, so a torchvision that matches this PyTorch must
    # stay as it is.
    for compiled in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            return False
        return True
    return False
