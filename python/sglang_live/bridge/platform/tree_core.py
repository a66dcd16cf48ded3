"""SGLang's radix tree in Rust, only with a PyTorch that it is known to work with.

SGLang's wheel has the extension built, for the PyTorch that it requires, and accepts 2.11 to 2.14.
The extension reads tensors through PyTorch's C++ classes: with 2.11 it takes an int64 tensor for
one of complex numbers, and the scheduler dies at its first prompt. The tree in Python has no such
limit.
"""

import logging
import os
import re
from importlib.metadata import requires

import torch

log = logging.getLogger(__name__)

# SGLang's own variable.
BACKEND_ENV = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
# PyTorch of the CPU set-up, with which the tests run the extension.
TESTED = ("2", "13")


def use_matching_tree_core() -> None:
    """Choose the tree in Python for this process and its children, unless a tree is chosen."""
    built_for = torch_of_sglang()
    if built_for is None or minor(torch.__version__) in (minor(built_for), TESTED):
        return
    if BACKEND_ENV not in os.environ:
        os.environ[BACKEND_ENV] = "python"
        log.warning("tree_in_python torch=%s sglang_was_built_for=%s", torch.__version__, built_for)


def torch_of_sglang() -> str | None:
    """The version of PyTorch that the installed SGLang requires. None: any."""
    for requirement in requires("sglang") or ():
        if found := re.match(r"torch\s*==\s*([\d.]+)", requirement):
            return found[1]
    return None


def minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
