"""Let CPU PyTorch import a torchvision that was built for CUDA.

A registry serves one torchvision per platform, built against CUDA. Beside CPU PyTorch its
compiled operators cannot load, and its own import then fails, because it attaches shape
functions to operators that nobody declared. transformers imports it for image processors,
so without this SGLang does not start on a CPU.

scripts/setup.sh writes a `.pth` file that calls `install()` in every Python process of the
CPU environment. Nothing is imported until somebody asks for torchvision.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

# The operators that torchvision touches at import time without checking that they exist.
OPS_TOUCHED_AT_IMPORT = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# torch forgets the declarations when the Library object is collected.
_declared: list[object] = []


class TorchvisionFinder(MetaPathFinder):
    """Finds nothing; runs once, just before the real finders look for torchvision."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_ops()
        return None


def install() -> None:
    """Arm the shim in this process. Calling it again changes nothing."""
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())


def declare_missing_ops() -> None:
    """Declare torchvision's operators unless its compiled ones load."""
    spec = PathFinder.find_spec("torchvision")
    if spec is None or "torchvision" in sys.modules:
        return
    import torch

    if _compiled_ops_load(torch, Path(spec.submodule_search_locations[0])):
        return
    library = torch.library.Library("torchvision", "DEF")
    for signature in OPS_TOUCHED_AT_IMPORT:
        library.define(signature)
    _declared.append(library)


def _compiled_ops_load(torch, package: Path) -> bool:
    # Declaring an operator that the compiled library declares too would be an error, so a
    # torchvision that does match this PyTorch must be left alone.
    for compiled in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            return False
        return True
    return False
