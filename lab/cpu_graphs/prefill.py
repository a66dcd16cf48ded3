"""Prefill graphs on the CPU platform: SGLang's own runner, with a tape in place of the segments.

A number of tokens is padded to the next captured one. The layers are replayed without their
Python; attention, which upstream calls between two segments, is one call of the tape.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
    BreakableCudaGraphBackend,
)
from sglang.srt.runtime_context import get_exec

from lab.cpu_graphs.graphs import TapeGraphBackend
from lab.cpu_graphs.tape import as_one_call

log = logging.getLogger(__name__)

_attend = RadixAttention._eager_attention


def capture_prefill_graph(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's function, which captures nothing where the attention cannot be captured."""
    get_exec().graph.cuda_graph_config.prefill.backend = Backend.BREAKABLE
    return original(*args, **kwargs)


def capture(runner: PrefillCudaGraphRunner) -> None:
    """Takes the place of PrefillCudaGraphRunner._capture."""
    with runner.backend.capture_session(None):
        runner._capture_one_stream()


def attention_as_one_call(layer: RadixAttention, *args: Any, **kwargs: Any) -> None:
    """In the place of RadixAttention._eager_attention, which writes into one of its arguments."""
    as_one_call(_attend, layer, *args, **kwargs)


class TapePrefillBackend(BreakableCudaGraphBackend):
    """Logs each number of tokens once, when it is replayed first."""

    def __init__(self, runner: PrefillCudaGraphRunner):
        super().__init__(runner)
        self._tapes = TapeGraphBackend(runner)
        self._logged: set[Any] = set()

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        with self.replay_session():
            yield

    def capture_one(self, *args: Any, **kwargs: Any) -> None:
        self._tapes.capture_one(*args, **kwargs)

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return self._tapes.can_run(forward_batch, shape_key)

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        if shape_key not in self._logged:
            self._logged.add(shape_key)
            log.info("prefill_graph tokens=%d replayed=True", shape_key.size)
        return self._tapes.replay(shape_key, static_forward_batch, **kwargs)

    def cleanup(self) -> None:
        self._tapes.cleanup()
