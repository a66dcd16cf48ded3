"""A replacement of multiprocessing that forks the engine's processes in a forked stage.

A fork need not import again what the stage has imported. SGLang spawns its processes because of
devices, and here there is none (stages/zygote.py).
"""

import multiprocessing
import os
from multiprocessing.context import ForkProcess
from typing import Any


class _Child(ForkProcess):
    def run(self) -> None:
        import torch

        # A spawned process would read the variable when it imports torch.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        super().run()


class Forking:
    """Takes the place of the module."""

    Process = _Child

    def set_start_method(self, method: str, force: bool = False) -> None:
        """Ignored: children are forked."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)
