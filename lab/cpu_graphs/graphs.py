"""Decode graphs on the CPU platform, for tests of what a GPU does: steps that run no Python.

SGLang's own `DecodeCudaGraphRunner` captures and replays: it pads batches to the captured sizes and
copies their inputs into static buffers. Only the graph itself is a `Tape`. Prefill, and batches
beyond the largest captured size, run eagerly, as on a GPU.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import (
    BaseCudaGraphBackend,
)
from torch import Tensor

from lab.cpu_graphs.tape import Tape, as_one_call

log = logging.getLogger(__name__)

# SGLang's own backends run a shape twice before they capture it.
_WARMUPS = 2


def capture_decode_graph(original: Callable[..., Any], *, model_runner: Any) -> GraphCapture:
    """Takes the place of SGLang's function, which captures on a CPU for torch.compile only."""
    if model_runner.graph_shared_output is None:
        # SGLang counts torch_native attention among those that cannot be captured.
        model_runner.graph_shared_output = GraphSharedOutput(
            device=model_runner.device, max_rows=model_runner.max_shared_logits_buffer_rows()
        )
    begin = time.perf_counter()
    runner = TapeGraphRunner(model_runner)
    return GraphCapture(
        runner=runner,
        memory_phase="decode",
        memory_usage_gb=0.0,
        capture_time=time.perf_counter() - begin,
    )


def moe_as_one_call(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Around the reference's mixture of experts, which reads the number of tokens of each expert
    on the host. On a GPU it is a kernel, which reads them on the device.
    """
    return as_one_call(original, *args, **kwargs)


class TapeAttention(TorchNativeAttnBackend):
    """The reference attention, whose decode step is one entry of a tape.

    It reads the lengths of the sequences on the host, in order to attend to as many slots. An
    attention kernel reads them on the device when it runs; both read the runner's static buffers
    at each replay, and write into a buffer whose address and shape are those of the capture.
    """

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The reference attention has no state of its own."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        return SharedReadEnds.POST_REPLAY

    def _run_sdpa_forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return as_one_call(super()._run_sdpa_forward_decode, *args, **kwargs)


class TapeGraphRunner(DecodeCudaGraphRunner):
    """Logs each batch size once, and whether such batches are replayed."""

    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        self._logged: set[int] = set()

    def can_run_graph(self, forward_batch: Any) -> bool:
        is_replayed = super().can_run_graph(forward_batch)
        n = forward_batch.batch_size
        if n not in self._logged:
            self._logged.add(n)
            log.info("decode_graph batch=%d replayed=%s", n, is_replayed)
        return is_replayed

    def _record_in_graph_metadata_prep_done(self) -> None:
        """A CPU has no stream that another could wait for."""


class TapeGraphBackend(BaseCudaGraphBackend):
    """A tape for each captured batch size."""

    def __init__(self, runner: DecodeCudaGraphRunner, *, enable_memory_saver: bool = False):
        self._tapes: dict[Any, tuple[Tape, Any]] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        for _ in range(_WARMUPS):
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        tape = Tape()
        with tape.recording():
            out = forward_fn()
        self._tapes[shape_key] = tape, out
        log.info("decode_graph_captured batch=%d calls=%d", shape_key.size, len(tape))

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._tapes

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        tape, out = self._tapes[shape_key]
        tape.replay()
        return out

    def cleanup(self) -> None:
        self._tapes.clear()
