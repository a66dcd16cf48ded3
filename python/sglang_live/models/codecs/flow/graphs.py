"""CUDA graphs of a flow: what begins a batch, and a step, which is replayed for each.

A batch is padded to the next captured numbers of streams and codes. What is padded is behind a
stream's end, where its convolutions do not look, and attention is masked; streams that are padded
have one code. So a batch sounds as without a graph. Its tensors are views of buffers that all
shapes share; graphs share a pool, which is as large as what the largest one computes.
A shape is captured when it first comes, also while streams are heard: three runs of one step and
the begin take less time than all steps, kernel by kernel, as a batch without a graph does.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_live.models.codecs.flow import AHEAD
from sglang_live.models.codecs.flow.padding import LEAST_STEP, LONGEST_CODES, padded_shape
from sglang_live.models.cuda_graphs import Capture, GraphTable

if TYPE_CHECKING:
    from sglang_live.models.codecs.flow.mels import FlowInput, TokenFlow

# A tensor by its name in FlowBatch, its shape and its type.
Make = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


class FlowGraphs(GraphTable):
    """Attributes: see GraphTable."""

    def __init__(self, flow: "TokenFlow", max_streams: int, capture: Capture):
        super().__init__(capture)
        self._flow, self._max_streams = flow, max_streams
        self._memory: dict[str, Tensor] = {}
        largest: dict[str, tuple[int, torch.dtype]] = {}

        def measured(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            n, _ = largest.get(name, (0, dtype))
            largest[name] = max(n, math.prod(shape)), dtype
            return torch.empty(0)

        for n in range(1, max_streams + 1):
            for longest in range(LEAST_STEP, LONGEST_CODES + 1, LEAST_STEP):
                if (shape := padded_shape(n, longest, max_streams)) is not None:
                    flow.batch(*shape, shape[1] + AHEAD, measured)
        for name, (n, dtype) in largest.items():
            self._memory[name] = torch.zeros(n, dtype=dtype, device=flow.device)

    def freeze(self) -> None:
        """Captures go on: see the module."""

    def run(self, inputs: "Sequence[FlowInput]", longest: int) -> Tensor | None:
        """[n_streams, n_columns, n_mels], or None if it is to be computed without a graph.

        longest: codes that have columns, of the longest stream.
        """
        flow, shape = self._flow, padded_shape(len(inputs), longest, self._max_streams)
        if shape is None:
            self.of(None)
            return None
        n, n_codes = shape
        batch = flow.batch(n, n_codes, n_codes + AHEAD, self._view)
        flow.fill(batch, inputs)
        replays = self.of(shape, partial(flow.begin, batch), partial(flow.step, batch))
        if not replays:
            return None
        begin, step = replays
        begin()
        for _ in range(flow.n_steps):
            step()
        return batch.x[: len(inputs)].clone()  # the next batch overwrites it

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memory[name][: math.prod(shape)].view(shape)
