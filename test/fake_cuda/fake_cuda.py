"""A CUDA device for machines without one: for the paths that code takes, not for times.

Tensors of the device lie in host memory and say that they are on `cuda:0`. Streams and events do
nothing, Triton's kernels are interpreted, a graph is a list of calls. What a GPU refuses is
refused: an operator over tensors of both devices, and a wait while a graph is captured. Triton's
interpreter computes with fp16 and fp32; its products of bf16 are wrong. Code in other languages
sees plain tensors, so that SGLang's tree must be the one in Python.
"""

import importlib.machinery
import os
import sys
import threading
from importlib.abc import MetaPathFinder
from pathlib import Path

ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent),
    "TRITON_INTERPRET": "1",
    # Compiled code would not pass through the functions that are watched.
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
}


class _WithTorch(MetaPathFinder):
    """Finds torch as usual, and installs the device when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            install()

        spec.loader.exec_module = exec_module
        return spec


def install_with_torch():
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # as for a GPU
        return
    sys.meta_path.insert(0, _WithTorch())


def install():
    from fake_cuda_graph import record_triton
    from fake_cuda_module import replace_cuda
    from fake_cuda_tensors import FakeDevice

    replace_cuda()
    FakeDevice().__enter__()  # of this thread, for good
    run = threading.Thread.run

    def run_with_device(thread):
        with FakeDevice():
            run(thread)

    threading.Thread.run = run_with_device
    if os.environ.get("TRITON_INTERPRET") == "1":
        record_triton()
