"""Codec frames to samples, chunk by chunk, with the left context carried as state.

In: the codes of 80 ms frames, from the talker. Out: final 24 kHz samples.
Owner: VocoderEngine holds one FrameStream per request and batches them through one FrameDecoder.
Every sample is computed once; re-decoding 25 frames of left context for a 4-frame chunk computes
seven times as many.
With CUDA there is one graph per number of streams, frames, and first or later chunks: a chunk is
hundreds of small kernels, whose launches take longer than their work. A graph's inputs are static
buffers, which all graphs share. Batches are padded to the next captured size, and the windows of
later chunks to their full length. Source: VoxServe (arXiv:2602.00269), section 4.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from sglang_live.errors import BadInputError
from sglang_live.models.cuda_graphs import Capture, CudaCapture, GraphTable
from sglang_live.models.speech_lm.code2wav_layers import (
    Act,
    CausalConv,
    CausalUpsample,
    ColumnTape,
    ConvNeXt,
    ResidualUnit,
    Snake,
    WindowTransformer,
)


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
_Key = tuple[int, int, bool]


def sizes_up_to(n: int) -> tuple[int, ...]:
    """Captured numbers of streams: powers of two, and n."""
    powers = [1 << bit for bit in range(n.bit_length()) if 1 << bit < n]
    return (*powers, n)


class Code2WavGraphs(GraphTable):
    """Not thread-safe. What `run` returns is overwritten by its next call."""

    def __init__(
        self, compute: Compute, like: Stream, *, n_past: int, max_streams: int, capture: Capture
    ):
        """
        Args:
            like: a new stream.
            n_past: frames of a full window before the chunk.
        """
        super().__init__(capture)
        self._compute = compute
        self._sizes = sizes_up_to(max_streams)
        n_layers, n_heads, _, head_dim = like.kv.shape
        self._past = like.kv.new_zeros(max_streams, n_layers, n_heads, n_past, head_dim)
        self._columns = like.columns.new_zeros(max_streams, len(like.columns))
        on_gpu = like.kv.is_cuda
        self._first_real = torch.full((max_streams,), n_past, device=like.kv.device)
        self._host_first_real = torch.full((max_streams,), n_past, pin_memory=on_gpu)
        self._codes: dict[int, tuple[Tensor, Tensor]] = {}  # by n_frames: device, host
        self._copied = torch.cuda.Event() if on_gpu else None

    def run(self, streams: Sequence[Stream], codes: Tensor, is_first: bool) -> ChunkOutputs | None:
        """The chunk's outputs, or None if it must be computed without a graph.

        Args:
            codes: as in ChunkInputs, on the CPU.
        """
        n, n_frames = codes.shape[:2]
        size = next((size for size in self._sizes if size >= n), None)
        if size is None:
            self.of(None)
            return None
        self._fill(streams, codes)
        key = size, n_frames, is_first
        for replay in self.of(key, partial(self._compute, self._inputs(key))):
            outputs: ChunkOutputs = replay()
            return outputs.of_first(n)
        return None

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


_SAMPLE_RATE_HZ = 24_000  # the checkpoint's config does not carry it


_Layer = CausalConv | CausalUpsample | ConvNeXt | ResidualUnit


@dataclass(slots=True, eq=False)
class FrameStream:
    """The state of one stream. Dropping it frees everything; nothing else refers to it.

    Attributes:
        kv: [n_layers, 2 * n_kv_heads, n_past, head_dim], unrotated keys before values,
            n_past = min(n_frames, sliding_window - 1).
        columns: [n_values], the convs' last input columns in layer order.
        n_frames: codec frames decoded so far.
    """

    kv: Tensor
    columns: Tensor
    n_frames: int = 0


def check_codes(codes: Tensor, n_quantizers: int, codebook_size: int, lowest: int = 0) -> None:
    """Refuse codes that are not in the codebook; on a GPU this waits for the codes.

    Args:
        codes: [..., n_quantizers] int64.
        lowest: END_CODE, where it may stand in the place of codes.
    Raises:
        BadInputError: if the dtype, the last dimension or a value is wrong.
    """
    if codes.dtype != torch.int64 or codes.ndim < 1 or codes.shape[-1] != n_quantizers:
        raise BadInputError(
            f"codes must be int64 [..., {n_quantizers}], got {codes.dtype} {list(codes.shape)}"
        )
    if codes.numel() == 0:
        return
    least, most = (int(value) for value in torch.aminmax(codes))
    if least < lowest or most >= codebook_size:
        raise BadInputError(f"codes must lie in [0, {codebook_size}), got {least} to {most}")


class FrameDecoder(ABC):
    """A stateless decoder of many streams. Not thread-safe per stream, safe across streams.

    A family writes how codes become the transformer's input. The layers around it are those of
    Qwen3-Omni, unless a family builds others.

    Attributes:
        trims_start: whether the transposed convolutions drop what a stream's first column gives
            alone; the first chunk then has fewer samples.
        positions_per_frame: of the transformer.
        n_quantizers: codes per frame.
        codebook_size: codes lie in [0, codebook_size).
        samples_per_frame: samples per frame once a stream is under way.
        sample_rate_hz: samples per second of the output.
        n_tail_frames, n_context_frames: see StreamDecoder; it does not look ahead.
        graphs: None until use_graphs.
    """

    n_tail_frames = 0
    trims_start: ClassVar[bool]
    positions_per_frame: ClassVar[int] = 1

    def __init__(self, module: nn.Module, *, device: torch.device | str, dtype: torch.dtype):
        """Copy the weights of module, which is not modified and may be dropped.

        Args:
            module: with pre_transformer, upsample and decoder as Qwen3OmniMoeCode2Wav of
                transformers has them, and their config.
        Raises:
            ValueError: if module is not float32 (weights are folded before they are rounded to
                dtype), its rope_type is not default, or the first frame of a stream emits no
                sample with its strides.
        """
        if any(weight.dtype != torch.float32 for weight in module.parameters()):
            raise ValueError("need a float32 module")
        self._device = torch.device(device)
        self._dtype = dtype
        self.graphs: Code2WavGraphs | None = None
        config = module.config
        self.n_quantizers = config.num_quantizers
        self.codebook_size = config.codebook_size
        self.sample_rate_hz = _SAMPLE_RATE_HZ
        # All codebooks share one table, one after the other.
        self._code_offset = torch.arange(self.n_quantizers, device=self._device)
        self._code_offset *= self.codebook_size
        self._layers: list[_Layer] = []
        with torch.no_grad():
            self._transformer = self._build_transformer(module)
            self._build_layers(module)
            self._build_input(module)
        self._n_values = sum(layer.n_values for layer in (*self._input_layers, *self._layers))
        self.n_context_frames = self._context_frames()
        self.samples_per_frame = self.samples_for(2) - self.samples_for(1)
        if self.samples_for(1) < 1:
            raise ValueError("the first frame emits nothing with these strides")

    # --- what a family writes ---

    _input_layers: tuple[CausalConv | CausalUpsample, ...] = ()

    @abstractmethod
    def _build_input(self, module: nn.Module) -> None:
        """Place the weights before, and directly behind, the transformer."""

    @abstractmethod
    def _embed(self, codes: Tensor, tape: ColumnTape) -> Tensor:
        """The transformer's input, [n_streams, n_frames * positions_per_frame, hidden].

        Args:
            codes: [n_streams, n_frames, n_quantizers] int64.
            tape: of whose columns `_input_layers` take the first.
        """

    def _leave(self, hidden: Tensor) -> Tensor:
        """The first layer's input from the transformer's output, [n_streams, n, width]."""
        return hidden

    def _build_transformer(self, module: nn.Module) -> WindowTransformer:
        return WindowTransformer(module.pre_transformer, self._place)

    # --- the rest ---

    def _place(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self._device, self._dtype, copy=True).contiguous()

    def _build_layers(self, module: nn.Module) -> None:
        place = self._place
        for upsample, convnext in module.upsample:
            self._layers += [self._upsample(upsample), ConvNeXt(convnext, place)]
        first, *blocks, last_act, last = module.decoder
        self._layers.append(CausalConv(first, place))
        for block in blocks:
            act, upsample, *units = block.block
            self._layers.append(self._upsample(upsample, Snake(act, place)))
            for unit in units:
                acts = Snake(unit.act1, place), Snake(unit.act2, place)
                self._layers.append(ResidualUnit(unit.conv1, unit.conv2, place, acts))
        self._layers.append(CausalConv(last, place, Snake(last_act, place)))

    def _upsample(self, module: nn.Module, act: Act | None = None) -> CausalUpsample:
        return CausalUpsample(module, self._place, act, trims_start=self.trims_start)

    def _context_frames(self) -> int:
        """Frames before a sample's own on which the sample depends, at most."""
        transformer, columns_per_frame = self._transformer, self.positions_per_frame
        n_positions = transformer.n_layers * (transformer.n_window_frames - 1)
        n_frames = n_positions / columns_per_frame
        n_frames += sum(layer.n_columns for layer in self._input_layers)
        for layer in self._layers:
            n_frames += layer.n_columns / columns_per_frame
            if isinstance(layer, CausalUpsample):
                columns_per_frame *= layer.stride
        return math.ceil(n_frames)

    def samples_for(self, n_frames_total: int) -> int:
        """Return how many samples a stream of n_frames_total frames has emitted, exactly."""
        n_columns = n_frames_total * self.positions_per_frame
        for layer in self._layers:
            if isinstance(layer, CausalUpsample):
                n_columns = layer.n_out(n_columns)
        return n_columns

    def new_stream(self) -> FrameStream:
        columns = torch.zeros(self._n_values, device=self._device, dtype=self._dtype)
        return FrameStream(self._transformer.new_past(columns), columns)

    def check_codes(self, codes: Tensor) -> None:
        """See the function of this name."""
        check_codes(codes, self.n_quantizers, self.codebook_size)

    @torch.inference_mode()
    def decode(self, streams: list[FrameStream], codes: Tensor) -> Tensor:
        """Decode the next chunk of several streams; their states change together or not at all.

        Args:
            streams: all new, or all under way: a first chunk is shorter in samples.
            codes: [n_streams, n_frames, n_quantizers] int64, n_frames >= 1, on any device.
        Returns:
            [n_streams, n_samples] float32 in [-1, 1], on the decoder's device. n_samples is
            n_frames * samples_per_frame, or samples_for(n_frames) for first chunks.
        Raises:
            BadInputError: see check_codes.
            ValueError: if streams are mixed or repeated, or the shapes do not fit.
        """
        self.check_codes(codes)
        if codes.ndim != 3 or len(codes) != len(streams) or codes.shape[1] < 1:
            raise ValueError(f"codes {list(codes.shape)} do not fit {len(streams)} streams")
        if len(set(streams)) != len(streams):
            raise ValueError("a stream occurs twice in one batch")
        is_first = streams[0].n_frames == 0
        if any((stream.n_frames == 0) != is_first for stream in streams):
            raise ValueError("first chunks and later ones cannot share a batch")
        outputs = None if self.graphs is None else self.graphs.run(streams, codes, is_first)
        if outputs is None:
            outputs = self._compute(self._gather(streams, codes, is_first))
        self._commit(streams, outputs.fresh_kv, outputs.columns)
        return outputs.wave

    def use_graphs(self, max_streams: int, capture: Capture | None = None) -> Code2WavGraphs:
        """Capture every shape that comes from now on, until `graphs.freeze()`.

        A returned wave is then overwritten by the next decode.

        Args:
            max_streams: batches above it run without a graph.
            capture: CUDA graphs on this decoder's device by default.
        """
        self.graphs = Code2WavGraphs(
            self._compute,
            self.new_stream(),
            n_past=self._transformer.n_window_frames - 1,
            max_streams=max_streams,
            capture=capture or CudaCapture(self._device),
        )
        return self.graphs

    def _compute(self, inputs: ChunkInputs) -> ChunkOutputs:
        """Tensors in, tensors out, without a wait for the device."""
        tape = ColumnTape(inputs.columns, is_first=inputs.is_first)
        hidden = self._embed(inputs.codes, tape)
        hidden, fresh_kv = self._transformer(hidden, inputs.past, inputs.first_real)
        wave = self._leave(hidden).transpose(1, 2)
        for layer in self._layers:
            wave = layer(wave, tape)
        return ChunkOutputs(wave[:, 0].float().clamp_(-1.0, 1.0), fresh_kv, tape.rewritten())

    def _gather(self, streams: list[FrameStream], codes: Tensor, is_first: bool) -> ChunkInputs:
        past, first_real = self._transformer.gather([stream.kv for stream in streams])
        columns = torch.stack([stream.columns for stream in streams])
        return ChunkInputs(codes.to(self._device), past, first_real, columns, is_first)

    def _commit(self, streams: list[FrameStream], fresh_kv: Tensor, columns: Tensor) -> None:
        """Write the new states, each to its own memory: a view would keep the batch alive."""
        n_frames = fresh_kv.shape[3] // self.positions_per_frame
        for stream, fresh, row in zip(streams, fresh_kv, columns, strict=True):
            stream.kv = self._transformer.grown(stream.kv, fresh)
            stream.columns = row.clone()
            stream.n_frames += n_frames
