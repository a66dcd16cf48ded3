"""multiprocessing for the engine of a stage that was forked: its children are forks as well.

What the stage has imported need not be imported again. SGLang asks for processes that begin anew,
because of devices; here there is none (stages/zygote.py).
"""

import multiprocessing
import os
from multiprocessing.context import ForkProcess
from typing import Any


class _Child(ForkProcess):
    def run(self) -> None:
        import torch

        # A process that begins anew would read it when it imports torch.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        super().run()


class Forking:
    """In place of the module."""

    Process = _Child

    def set_start_method(self, method: str, force: bool = False) -> None:
        """It is settled."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)
