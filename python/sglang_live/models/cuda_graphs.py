"""Kernels of a decoder's calls, captured once for each shape and replayed: CUDA graphs.

Owner: a decoder has one GraphTable for all its shapes; not thread-safe. Its calls work on static
buffers: what Python computes while a call is captured is frozen.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

_WARM_UP_CALLS = 2

Call = Callable[[], Any]


class Capture(Protocol):
    def __call__(self, call: Call) -> Call:
        """The call's replay, which fills and returns the same outputs each time."""
        ...


class CudaCapture:
    """Captures on a stream of its own; all graphs share one pool of memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> Call:
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_CALLS):  # libraries allocate, which capture does not allow
                    call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the stage may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = call()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay


class GraphTable:
    """
    Attributes:
        counts: replays; batches without a graph ("fallbacks"); shapes whose capture failed.
    """

    def __init__(self, capture: Capture):
        self._capture = capture
        self._replays: dict[Hashable, tuple[Call, ...]] = {}
        self._is_frozen = False
        self.counts = {"replays": 0, "fallbacks": 0, "failed_captures": 0}

    def freeze(self) -> None:
        """From now on a shape without a graph runs without one: a capture would be a gap."""
        self._is_frozen = True

    def of(self, shape: Hashable | None, *calls: Call) -> tuple[Call, ...]:
        """Replays of the calls, which are counted as one batch; none: it runs without a graph.

        Args:
            shape: what tells the calls from others. None: it is beyond what is captured.
        """
        found = () if shape is None else self._captured(shape, calls)
        self.counts["replays" if found else "fallbacks"] += 1
        return found

    def _captured(self, shape: Hashable, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        if shape not in self._replays:
            if self._is_frozen:
                return ()
            try:
                self._replays[shape] = tuple(map(self._capture, calls))
            except RuntimeError as error:
                # The vocoder is right without graphs, only slower: it serves, and counts them.
                log.warning("vocoder_graph_failed shape=%s error=%s", shape, error)
                self.counts["failed_captures"] += 1
                self._replays[shape] = ()
        return self._replays[shape]
