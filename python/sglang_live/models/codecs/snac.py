"""SNAC's decoder for streams: frames of codes to samples, chunk by chunk, exactly.

In: frames of codes, as a language model writes them. Out: final samples.
Owner: VocoderEngine holds one SnacStream per job and batches them through one SnacDecoder. Every
sample is computed once, and none is lost: the usual window of four frames, of which the second is
kept, is off by up to a percent, and has neither the first frame nor the last two. SNAC looks 200 ms
ahead; so the sound is behind its frames by that, and frames of END_CODE after the last one bring
the rest.
The convolutions over chunks equal those over the whole input. Each layer looks ahead, so that its
output is behind its input by its delay. What lies before a stream's begin and behind its end is
zero in every layer, as in a convolution that pads; that makes begin, middle and end of a stream one
computation, which streams of any age share.
DAC is a SNAC whose codebooks have one rate, without noise and depthwise convolutions (dac.py).
Source: snac 1.2 (hubertsiuzdak/snac, MIT).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE, WEIGHTS, SnacConfig
from sglang_live.models.speech_lm.frame_decoder import check_codes
from sglang_live.models.torch_files import read_torch_file

_PARTS = ("decoder.", "quantizer.")
_NORM = ".parametrizations.weight.original"


def load_snac(path: Path) -> tuple[SnacConfig, dict[str, Tensor]]:
    """The config, and the tensors of decoder and quantizers in float32, on the CPU.

    Weights that are stored as norm and direction are put together.

    Raises:
        BadInputError: a file is missing or cannot be read, or it is another kind of SNAC.
    """
    config, file = SnacConfig.load(path), path / WEIGHTS
    stored = read_torch_file(file)
    return config, folded({k: v for k, v in stored.items() if k.startswith(_PARTS)})


def folded(stored: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors by the names of their layers. torch has had two names for both parts of a weight."""
    tensors: dict[str, Tensor] = {}
    for name, value in stored.items():
        if name.endswith((f"{_NORM}1", ".weight_v")):
            layer, norm_name = _layer_of(name)
            direction, norm = value.float(), stored[norm_name].float()
            length = direction.flatten(1).norm(dim=1).view(norm.shape)
            tensors[f"{layer}.weight"] = direction * (norm / length)
        elif not name.endswith((f"{_NORM}0", ".weight_g")):
            tensors[name] = value.float()
    return tensors


def _layer_of(direction: str) -> tuple[str, str]:
    """The layer whose weight has this direction, and the name of its norm."""
    if direction.endswith(".weight_v"):
        layer = direction.removesuffix(".weight_v")
        return layer, f"{layer}.weight_g"
    layer = direction.removesuffix(f"{_NORM}1")
    return layer, f"{layer}{_NORM}0"


# Entries of the table of noise, 44 s at 24 kHz. Each block begins a quarter further on.
NOISE_SIZE = 1 << 20


class ChunkTape:
    """What the layers know of one chunk of several streams, in the order of the layers.

    Args:
        rows: [n_streams, n_values], the last input columns of all layers; not modified.
        begin: [n_streams, 1] int64, latent columns of each stream before the chunk.
        end: [n_streams, 1] int64, latent columns of each stream in all.
        is_inner: no stream begins or ends near the chunk, so that nothing has to become zero.
    """

    def __init__(self, rows: Tensor, begin: Tensor, end: Tensor, *, is_inner: bool):
        self._rows = rows
        self._begin = begin
        self._end = end
        self._is_inner = is_inner
        self._new_rows = torch.empty_like(rows)
        self._offset = 0
        self._rate = 1
        self._delay = 0

    def extend(self, x: Tensor, n_columns: int) -> Tensor:
        """Precede x [n_streams, n_channels, n] by the n_columns columns before it, and store its
        last ones."""
        shape = (len(x), x.shape[1], n_columns)
        span = slice(self._offset, self._offset + shape[1] * n_columns)
        self._offset = span.stop
        joined = torch.cat((self._rows[:, span].view(shape), x), dim=2)
        self._new_rows[:, span].view(shape).copy_(joined[..., x.shape[2] :])
        return joined

    def passed(self, stride: int, delay: int) -> None:
        """The layer has made `stride` columns of each, `delay` of them further back."""
        self._rate = self._rate * stride
        self._delay = self._delay * stride + delay

    def positions(self, n: int) -> Tensor:
        """[n_streams, n], of n columns since the stream's begin."""
        first = self._begin * self._rate - self._delay
        return first + torch.arange(n, device=first.device)

    def inside(self, x: Tensor) -> Tensor:
        """x, zero where its stream has not begun or has ended; modified in place."""
        if self._is_inner:
            return x
        at = self.positions(x.shape[2])
        return x.mul_(((at >= 0) & (at < self._end * self._rate)).unsqueeze(1))

    def rewritten(self) -> Tensor:
        """The rows for the next chunk, [n_streams, n_values]."""
        assert self._offset == self._rows.shape[1], "a layer did not take its columns"
        return self._new_rows


class Weights:
    """Tensors of a checkpoint by name, on the decoder's device."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype):
        self._tensors = tensors
        self._device = device
        self._dtype = dtype

    def take(self, name: str) -> Tensor:
        """Raises BadInputError if the checkpoint lacks the tensor."""
        if name not in self._tensors:
            raise BadInputError(f"the codec's weights lack {name}")
        return self._tensors[name].to(self._device, self._dtype, copy=True).contiguous()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def count(self, name: str) -> int:
        """Of the layers of a list, which are numbered from 0."""
        at = name.count(".") + 1
        return len({key.split(".")[at] for key in self._tensors if key.startswith(f"{name}.")})


class Snake:
    """x + sin²(αx) / α, with α per channel. Source: arXiv:2006.08195."""

    def __init__(self, weights: Weights, name: str):
        alpha = weights.take(f"{name}.alpha")[0]
        self._alpha = alpha
        self._inverse = 1.0 / (alpha + 1e-9)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_streams, n_channels, n]; not modified."""
        return torch.addcmul(x, (x * self._alpha).sin_().square_(), self._inverse)


class Conv:
    """A centred convolution with stride 1: a column needs `delay` columns on both sides."""

    stride = 1

    def __init__(self, weights: Weights, name: str, dilation: int = 1, act: Snake | None = None):
        """Depthwise or dense, as its weight [out, in / groups, kernel] is."""
        self._weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")
        n_out, n_in_group, kernel = self._weight.shape
        self._groups = n_out if n_in_group == 1 else 1
        self._dilation = dilation
        self.delay = (kernel - 1) * dilation // 2
        self.n_values = n_in_group * self._groups * 2 * self.delay
        self.act = act

    def __call__(self, x: Tensor, tape: ChunkTape) -> Tensor:
        return self.with_centre(x, tape)[0]

    def with_centre(self, x: Tensor, tape: ChunkTape) -> tuple[Tensor, Tensor]:
        """The output, and the columns of the input at its positions."""
        joined = tape.extend(x, 2 * self.delay)
        tape.passed(1, self.delay)
        shaped = joined if self.act is None else self.act(joined)
        y = F.conv1d(shaped, self._weight, self._bias, dilation=self._dilation, groups=self._groups)
        return y, joined[..., self.delay : self.delay + x.shape[2]]


class Upsample:
    """Snake, and a transposed convolution whose kernel is twice its stride.

    Input columns i - 1 and i together determine the columns [i * stride, (i + 1) * stride) of its
    untrimmed output, of which the reference trims the first ceil(stride / 2): the delay.
    """

    def __init__(self, weights: Weights, name: str, act: Snake, stride: int):
        self._act = act
        self.stride = stride
        self.delay = -(-stride // 2)
        self._weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")
        self.n_values = len(self._weight)

    def __call__(self, x: Tensor, tape: ChunkTape) -> Tensor:
        joined = self._act(tape.extend(x, 1))
        tape.passed(self.stride, self.delay)
        y = F.conv_transpose1d(
            joined, self._weight, self._bias, stride=self.stride, padding=self.stride
        )
        return tape.inside(y)


class Noise:
    """Adds noise in proportion to a projection of the input.

    The reference draws it anew for each call. Here it is a function of block and position alone:
    so equal codes give equal sound, whatever the chunks and the other streams of the batch.
    """

    stride, delay, n_values = 1, 0, 0

    def __init__(self, weights: Weights, name: str, block: int, table: Tensor):
        self._weight = weights.take(f"{name}.weight")
        self._table = table
        self._shift = block * (NOISE_SIZE // 4)

    def __call__(self, x: Tensor, tape: ChunkTape) -> Tensor:
        at = tape.positions(x.shape[2]) + self._shift
        noise = self._table[at & (NOISE_SIZE - 1)].unsqueeze(1)
        return torch.addcmul(x, noise, F.conv1d(x, self._weight))


def noise_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[NOISE_SIZE] standard normal, the same in every process."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(NOISE_SIZE, generator=seeded).to(device, dtype)


class ResidualUnit:
    """Snake, dilated conv, snake, pointwise conv, around a residual."""

    stride = 1

    def __init__(self, weights: Weights, name: str, dilation: int):
        self._dilated = Conv(weights, f"{name}.1", dilation, Snake(weights, f"{name}.0"))
        self._act = Snake(weights, f"{name}.2")
        self._weight = weights.take(f"{name}.3.weight")
        self._bias = weights.take(f"{name}.3.bias")
        self.delay = self._dilated.delay
        self.n_values = self._dilated.n_values

    def __call__(self, x: Tensor, tape: ChunkTape) -> Tensor:
        y, centre = self._dilated.with_centre(x, tape)
        return tape.inside(F.conv1d(self._act(y), self._weight, self._bias).add_(centre))


_DILATIONS = (1, 3, 9)
_ENDLESS = 1 << 40  # latent columns of a stream that has not ended


@dataclass(slots=True, eq=False)
class SnacStream:
    """The state of one stream. Dropping it frees everything; nothing else refers to it.

    Attributes:
        columns: [n_values], the layers' last input columns in their order.
        n_frames: decoded so far, with those behind the end.
        n_total: frames of the whole stream. None: it has not ended.
    """

    columns: Tensor
    n_frames: int = 0
    n_total: int | None = None


class SnacDecoder:
    """A stateless decoder of many streams. Not thread-safe per stream, safe across streams.

    A frame has its codes depth first: one of the coarsest level, then for each half of the frame
    one of the next level, before those of the half's own halves.

    Attributes:
        n_quantizers: codes per frame.
        codebook_size: codes lie in [0, codebook_size).
        samples_per_frame, sample_rate_hz: of the sound.
        n_tail_frames: frames of END_CODE with which the last samples of a stream come.
        n_context_frames: see StreamDecoder; the noise depends on the place in the stream.
    """

    n_context_frames = None

    def __init__(
        self,
        config: SnacConfig,
        tensors: dict[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """tensors: those of load_snac, in float32; copied."""
        self._device = torch.device(device)
        self._dtype = dtype
        self._config = config
        self._weights = weights = Weights(tensors, self._device, dtype)
        self.codebook_size = config.codebook_size
        self.sample_rate_hz = config.sampling_rate
        self._columns_per_frame = config.vq_strides[0]
        slots = _slots(config.vq_strides)
        self.n_quantizers = 1 + max(max(of_level) for of_level in slots)
        self._slots = torch.tensor(slots, device=self._device)
        self._codebooks = [
            weights.take(f"quantizer.quantizers.{i}.codebook.weight") for i in range(len(slots))
        ]
        self._out = [
            (weights.take(f"{name}.weight")[..., 0], weights.take(f"{name}.bias"))
            for name in (f"quantizer.quantizers.{i}.out_proj" for i in range(len(slots)))
        ]
        self._build()
        rate, delay = 1, 0
        for layer in self._layers:
            rate, delay = rate * layer.stride, delay * layer.stride + layer.delay
        self.samples_per_frame = self._columns_per_frame * rate
        self._delay = delay
        self.n_tail_frames = -(-delay // self.samples_per_frame)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "SnacDecoder":
        """Load a directory with config.json and pytorch_model.bin; see load_snac."""
        return cls(*load_snac(Path(path)), device=device, dtype=dtype)

    def _build(self) -> None:
        weights, rates = self._weights, self._config.decoder_rates
        self._first = Conv(weights, "decoder.model.0")
        first_block = 1
        self._widen = None
        if self._config.depthwise:
            name, first_block = "decoder.model.1", 2
            self._widen = weights.take(f"{name}.weight"), weights.take(f"{name}.bias")
        self._layers: list[Conv | Upsample | Noise | ResidualUnit] = [self._first]
        table = noise_table(self._device, self._dtype)
        for block, stride in enumerate(rates):
            name = f"decoder.model.{block + first_block}.block"
            act = Snake(weights, f"{name}.0")
            self._layers.append(Upsample(weights, f"{name}.1", act, stride))
            if self._config.noise:
                self._layers.append(Noise(weights, f"{name}.2.linear", block, table))
            first_unit = 3 if self._config.noise else 2
            self._layers += [
                ResidualUnit(weights, f"{name}.{first_unit + i}.block", dilation)
                for i, dilation in enumerate(_DILATIONS)
            ]
        n = len(rates) + first_block
        act = Snake(weights, f"decoder.model.{n}")
        self._layers.append(Conv(weights, f"decoder.model.{n + 1}", act=act))

    def new_stream(self) -> SnacStream:
        n_values = sum(layer.n_values for layer in self._layers)
        return SnacStream(torch.zeros(n_values, device=self._device, dtype=self._dtype))

    def use_graphs(self, max_streams: int) -> None:
        """There are none: it runs kernel by kernel on a GPU, too."""

    def check_codes(self, codes: Tensor) -> None:
        """See frame_decoder.check_codes."""
        check_codes(codes, self.n_quantizers, self.codebook_size)

    @torch.inference_mode()
    def decode(self, streams: list[SnacStream], codes: Tensor) -> list[Tensor]:
        """Decode the next chunk of several streams; their states change together or not at all.

        Args:
            streams: of any ages.
            codes: [n_streams, n_frames, n_quantizers] int64, n_frames >= 1, on any device. Frames
                behind a stream's last one have END_CODE in every place.
        Returns:
            [n_samples] float32 in [-1, 1] of each stream, on the decoder's device: those that its
            frames so far determine, and that it has not yet returned. In all they are n_total *
            samples_per_frame.
        Raises:
            BadInputError: see check_codes.
            ValueError: if a stream is repeated or goes on behind its end, or the shapes do not fit.
        """
        if codes.ndim != 3 or len(codes) != len(streams) or codes.shape[1] < 1:
            raise ValueError(f"codes {list(codes.shape)} do not fit {len(streams)} streams")
        if len(set(streams)) != len(streams):
            raise ValueError("a stream occurs twice in one batch")
        check_codes(codes, self.n_quantizers, self.codebook_size, END_CODE)
        totals = _totals(streams, codes)
        tape = self._tape(streams, totals)
        wave = self._compute(codes.to(self._device), tape)
        n_frames, rows = codes.shape[1], tape.rewritten()
        waves = []
        for stream, total, samples, row in zip(streams, totals, wave, rows, strict=True):
            at = stream.n_frames * self.samples_per_frame - self._delay
            end = len(samples) if total is None else total * self.samples_per_frame - at
            waves.append(samples[max(0, -at) : max(0, end)])
            stream.columns = row.clone()  # a view would keep the batch alive
            stream.n_frames += n_frames
            stream.n_total = total
        return waves

    def _tape(self, streams: list[SnacStream], totals: list[int | None]) -> ChunkTape:
        per_frame = self._columns_per_frame
        begin = [stream.n_frames * per_frame for stream in streams]
        end = [_ENDLESS if total is None else total * per_frame for total in totals]
        grown = all(stream.n_frames >= self.n_tail_frames for stream in streams)
        return ChunkTape(
            torch.stack([stream.columns for stream in streams]),
            torch.tensor(begin, device=self._device).unsqueeze(1),
            torch.tensor(end, device=self._device).unsqueeze(1),
            is_inner=grown and all(total is None for total in totals),
        )

    def _compute(self, codes: Tensor, tape: ChunkTape) -> Tensor:
        """[n_streams, n_samples] float32, without a wait for the device."""
        latents = tape.inside(self._latents(codes))
        wave = self._first(latents, tape)
        if self._widen is not None:
            wave = F.conv1d(wave, *self._widen)
        wave = tape.inside(wave)
        for layer in self._layers[1:]:
            wave = layer(wave, tape)
        sound = wave[:, 0].float()
        return sound.tanh_() if self._config.bounded else sound.clamp_(-1.0, 1.0)

    def _latents(self, codes: Tensor) -> Tensor:
        """[n_streams, n_latent, n_columns] of codes [n_streams, n_frames, n_quantizers]."""
        spread = codes.clamp(min=0)[..., self._slots]  # [n_streams, n_frames, n_levels, n_columns]
        latents = torch.zeros((), device=self._device, dtype=self._dtype)
        for level, (book, (weight, bias)) in enumerate(
            zip(self._codebooks, self._out, strict=True)
        ):
            ids = spread[:, :, level].flatten(1)
            latents = latents + F.linear(F.embedding(ids, book), weight, bias)
        return latents.transpose(1, 2)


def _slots(vq_strides: tuple[int, ...]) -> list[list[int]]:
    """Of each level and each latent column of a frame, the place of its code in the frame."""
    n_columns, place = vq_strides[0], 0
    slots = [[0] * n_columns for _ in vq_strides]
    for column in range(n_columns):
        for level, stride in enumerate(vq_strides):
            if column % stride == 0:
                slots[level][column : column + stride] = [place] * stride
                place += 1
    return slots


def _totals(streams: list[SnacStream], codes: Tensor) -> list[int | None]:
    """The frames of each whole stream, as far as known with this chunk."""
    is_end = codes == END_CODE
    n_frames = codes.shape[1]
    n_real = (~is_end[..., 0]).sum(1)
    ended = torch.arange(n_frames, device=codes.device) >= n_real.unsqueeze(1)
    if not torch.equal(is_end, ended.unsqueeze(2).expand_as(is_end)):
        raise ValueError("END_CODE is not in every place of the frames behind the last one")
    totals: list[int | None] = []
    for stream, n in zip(streams, n_real.tolist(), strict=True):
        if stream.n_total is not None and n:
            raise ValueError(f"a stream of {stream.n_total} frames goes on behind its end")
        if stream.n_total is None and n < n_frames:
            totals.append(stream.n_frames + n)
        else:
            totals.append(stream.n_total)
    return totals
