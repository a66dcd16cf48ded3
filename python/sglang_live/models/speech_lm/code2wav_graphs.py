"""CUDA graphs of the vocoder: one per number of streams, frames, and first or later chunks.

A chunk is hundreds of small kernels, whose launches take longer than their work. A graph's inputs
are static buffers, which all graphs share. Batches are padded to the next captured size, and the
windows of later chunks to their full length.
Source: VoxServe (arXiv:2602.00269), section 4.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_WARM_UP_CALLS = 2


class Stream(Protocol):
    """kv: [n_layers, 2 * n_kv_heads, n_past, head_dim]. columns: [n_values]."""

    kv: Tensor
    columns: Tensor


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """
    codes: [n_streams, n_frames, n_quantizers] int64.
    past: [n_streams, n_layers, 2 * n_kv_heads, n_past, head_dim], padded on the left.
    first_real: [n_streams] int64, index of the first frame in past that is not padding. None: no
        stream is padded.
    columns: [n_streams, n_values].
    is_first: whether these are the streams' first chunks.
    """

    codes: Tensor
    past: Tensor
    first_real: Tensor | None
    columns: Tensor
    is_first: bool


@dataclass(frozen=True, slots=True)
class ChunkOutputs:
    """
    wave: [n_streams, n_samples] float32.
    fresh_kv: [n_streams, n_layers, 2 * n_kv_heads, n_frames, head_dim].
    columns: [n_streams, n_values].
    """

    wave: Tensor
    fresh_kv: Tensor
    columns: Tensor

    def of_first(self, n: int) -> "ChunkOutputs":
        return ChunkOutputs(self.wave[:n], self.fresh_kv[:n], self.columns[:n])


Compute = Callable[[ChunkInputs], ChunkOutputs]
# From a call to its replay, which fills and returns the same outputs each time.
Capture = Callable[[Callable[[], ChunkOutputs]], Callable[[], ChunkOutputs]]
_Key = tuple[int, int, bool]


def sizes_up_to(n: int) -> tuple[int, ...]:
    """Captured numbers of streams: powers of two, and n."""
    powers = [1 << bit for bit in range(n.bit_length()) if 1 << bit < n]
    return (*powers, n)


class CudaCapture:
    """Captures on a stream of its own; all graphs share one pool of memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], ChunkOutputs]) -> Callable[[], ChunkOutputs]:
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

        def replay() -> ChunkOutputs:
            graph.replay()
            return outputs

        return replay


class Code2WavGraphs:
    """
    Not thread-safe. What `run` returns is overwritten by its next call.

    Attributes:
        counts: replays; chunks without a graph ("fallbacks"); shapes whose capture failed.
    """

    def __init__(
        self, compute: Compute, like: Stream, *, n_past: int, max_streams: int, capture: Capture
    ):
        """
        Args:
            like: a new stream.
            n_past: frames of a full window before the chunk.
        """
        self._compute, self._capture = compute, capture
        self._sizes = sizes_up_to(max_streams)
        self._graphs: dict[_Key, Callable[[], ChunkOutputs] | None] = {}
        self._is_frozen = False
        self.counts = {"replays": 0, "fallbacks": 0, "failed_captures": 0}
        n_layers, n_heads, _, head_dim = like.kv.shape
        self._past = like.kv.new_zeros(max_streams, n_layers, n_heads, n_past, head_dim)
        self._columns = like.columns.new_zeros(max_streams, len(like.columns))
        on_gpu = like.kv.is_cuda
        self._first_real = torch.full((max_streams,), n_past, device=like.kv.device)
        self._host_first_real = torch.full((max_streams,), n_past, pin_memory=on_gpu)
        self._codes: dict[int, tuple[Tensor, Tensor]] = {}  # by n_frames: device, host
        self._copied = torch.cuda.Event() if on_gpu else None

    def freeze(self) -> None:
        """From now on a shape without a graph runs without one: a capture would be a gap."""
        self._is_frozen = True

    def run(self, streams: Sequence[Stream], codes: Tensor, is_first: bool) -> ChunkOutputs | None:
        """The chunk's outputs, or None if it must be computed without a graph.

        Args:
            codes: as in ChunkInputs, on the CPU.
        """
        n, n_frames = codes.shape[:2]
        size = next((size for size in self._sizes if size >= n), None)
        replay = None
        if size is not None:
            self._fill(streams, codes)
            replay = self._graph((size, n_frames, is_first))
        if replay is None:
            self.counts["fallbacks"] += 1
            return None
        self.counts["replays"] += 1
        return replay().of_first(n)

    def _graph(self, key: _Key) -> Callable[[], ChunkOutputs] | None:
        if key not in self._graphs:
            if self._is_frozen:
                return None
            inputs = self._inputs(key)
            try:
                self._graphs[key] = self._capture(lambda: self._compute(inputs))
            except RuntimeError as error:
                # The vocoder is right without graphs, only slower: it serves, and counts them.
                log.warning("vocoder_graph_failed shape=%s error=%s", key, error)
                self.counts["failed_captures"] += 1
                self._graphs[key] = None
        return self._graphs[key]

    def _inputs(self, key: _Key) -> ChunkInputs:
        size, n_frames, is_first = key
        codes, _ = self._codes[n_frames]
        # A first chunk has no past.
        past = self._past[:size, :, :, :0] if is_first else self._past[:size]
        first_real = None if is_first else self._first_real[:size]
        return ChunkInputs(codes[:size], past, first_real, self._columns[:size], is_first)

    def _fill(self, streams: Sequence[Stream], codes: Tensor) -> None:
        """Rows behind the streams keep what they held: valid inputs, whose outputs are dropped."""
        n, n_past = len(streams), self._past.shape[3]
        on_device, on_host = self._code_buffers(codes)
        if self._copied is not None:
            self._copied.synchronize()  # of the previous chunk, long done in serving
        on_host[:n] = codes
        on_device.copy_(on_host, non_blocking=True)
        for i, stream in enumerate(streams):
            age = stream.kv.shape[2]
            self._past[i, :, :, n_past - age :] = stream.kv
            self._columns[i] = stream.columns
            self._host_first_real[i] = n_past - age
        self._first_real.copy_(self._host_first_real, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _code_buffers(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        _, n_frames, n_quantizers = codes.shape
        if n_frames not in self._codes:
            shape = (len(self._past), n_frames, n_quantizers)
            on_device = torch.zeros(shape, dtype=torch.int64, device=self._past.device)
            on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=self._past.is_cuda)
            self._codes[n_frames] = on_device, on_host
        return self._codes[n_frames]
