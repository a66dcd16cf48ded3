"""Counts what a model's eager forward passes launch, by module: about one kernel for each operator.

An operator that only looks at memory, or that only takes some, launches nothing. A few launch
several kernels (sorts, products that are split), so that this is the least. Passes that are
replayed from a graph run no Python, and are not counted.
In: LAB_OPERATOR_COUNT, a folder. Out: STAGE.jsonl there, a line for each forward pass.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lab.attachment import around
from sglang_live.attachment import ATTACH_ENV
from sglang_live.engine_channel.inbox import STAGE_ENV

OPERATOR_COUNT_ENV = "LAB_OPERATOR_COUNT"
TRITON = "triton"
_MEMORY = ("empty", "new_empty", "resize_", "set_", "record_stream", "_record_function")


class OperatorCount(TorchDispatchMode):
    """
    counts: (class of the innermost module, operator) -> launches.
    pauses: whether operators are not counted.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.pauses = False
        self._modules: list[str] = [type(model).__name__]
        for module in model.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.pauses and not func.is_view and not name.startswith(_MEMORY):
            self.launched(name)
        return func(*args, **(kwargs or {}))

    def launched(self, name: str) -> None:
        self.counts[self._modules[-1], name] += 1

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._modules.append(type(module).__name__)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._modules.pop()


class ForwardCounter:
    def __init__(self, path: Path):
        self._path = path
        self._count: OperatorCount | None = None

    def forward(
        self, forward: Callable[..., Any], runner: Any, batch: Any, *args: Any, **named: Any
    ) -> Any:
        """Around ModelRunner.forward."""
        if self._count is None:
            self._count = OperatorCount(runner.model)
        count = self._count
        count.counts.clear()
        with count:
            result = forward(runner, batch, *args, **named)
        line = {
            "is_decode": batch.forward_mode.is_decode(),
            "n_tokens": len(batch.input_ids),
            "n_launches": count.counts.total(),
            "by_module": [[*key, n] for key, n in count.counts.most_common()],
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return result

    def launch(self, run: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Around a launch of a Triton kernel, whose interpreter uses PyTorch itself."""
        count = self._count
        if count is None:
            return run(*args, **named)
        count.launched(TRITON)
        count.pauses = True
        try:
            return run(*args, **named)
        finally:
            count.pauses = False


def environment(folder: Path) -> dict[str, str]:
    return {ATTACH_ENV: "lab.recorders.operator_count:attach", OPERATOR_COUNT_ENV: str(folder)}


def attach(place: str) -> None:
    stage = os.environ.get(STAGE_ENV)
    if place != "sglang" or stage not in ("thinker", "talker"):
        return
    from sglang.srt.model_executor.model_runner import ModelRunner

    counter = ForwardCounter(Path(os.environ[OPERATOR_COUNT_ENV]) / f"{stage}.jsonl")
    around(ModelRunner, "forward", counter.forward)
    if torch.cuda.is_available():
        from triton.runtime import jit

        around(jit.JITFunction, "run", counter.launch)
        if os.environ.get("TRITON_INTERPRET") == "1":
            from triton.runtime import interpreter

            around(interpreter.InterpretedFunction, "run", counter.launch)
