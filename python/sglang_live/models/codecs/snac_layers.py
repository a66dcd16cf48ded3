"""SNAC's convolutions over chunks, with results equal to those over the whole input.

In: activations of one chunk. Out: as many columns as it has, times the stride, but of a position
further back: each layer looks ahead, so that its output is behind its input by its delay.
Owner: SnacDecoder. What lies before a stream's begin and behind its end is zero in every layer, as
in a convolution that pads; that makes begin, middle and end of a stream one computation, which
streams of any age share.
Source: snac 1.2 (hubertsiuzdak/snac, MIT).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.errors import BadInputError

# Entries of the table of noise, 44 s at 24 kHz. Each block begins a quarter further on.
_NOISE_SIZE = 1 << 20


class ChunkTape:
    """What the layers know of one chunk of several streams, in the order of the layers.

    Args:
        rows: [n_streams, n_values], the last input columns of all layers; not modified.
        begin: [n_streams, 1] int64, latent columns of each stream before the chunk.
        end: [n_streams, 1] int64, latent columns of each stream in all.
        is_inner: no stream begins or ends near the chunk, so that nothing has to become zero.
    """

    def __init__(self, rows: Tensor, begin: Tensor, end: Tensor, *, is_inner: bool):
        self._rows, self._begin, self._end, self._is_inner = rows, begin, end, is_inner
        self._new_rows = torch.empty_like(rows)
        self._offset, self._rate, self._delay = 0, 1, 0

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
        self._rate, self._delay = self._rate * stride, self._delay * stride + delay

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
        self._tensors, self._device, self._dtype = tensors, device, dtype

    def take(self, name: str) -> Tensor:
        """Raises BadInputError if the checkpoint lacks the tensor."""
        if name not in self._tensors:
            raise BadInputError(f"SNAC's weights lack {name}")
        return self._tensors[name].to(self._device, self._dtype, copy=True).contiguous()


class Snake:
    """x + sin²(αx) / α, with α per channel. Source: arXiv:2006.08195."""

    def __init__(self, weights: Weights, name: str):
        alpha = weights.take(f"{name}.alpha")[0]
        self._alpha, self._inverse = alpha, 1.0 / (alpha + 1e-9)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_streams, n_channels, n]; not modified."""
        return torch.addcmul(x, (x * self._alpha).sin_().square_(), self._inverse)


class Conv:
    """A centred convolution with stride 1: a column needs `delay` columns on both sides."""

    stride = 1

    def __init__(self, weights: Weights, name: str, dilation: int = 1, act: Snake | None = None):
        """Depthwise or dense, as its weight [out, in / groups, kernel] is."""
        self._weight, self._bias = weights.take(f"{name}.weight"), weights.take(f"{name}.bias")
        n_out, n_in_group, kernel = self._weight.shape
        self._groups = n_out if n_in_group == 1 else 1
        self._dilation, self.delay = dilation, (kernel - 1) * dilation // 2
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
        self._act, self.stride, self.delay = act, stride, -(-stride // 2)
        self._weight, self._bias = weights.take(f"{name}.weight"), weights.take(f"{name}.bias")
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
        self._weight, self._table = weights.take(f"{name}.weight"), table
        self._shift = block * (_NOISE_SIZE // 4)

    def __call__(self, x: Tensor, tape: ChunkTape) -> Tensor:
        at = tape.positions(x.shape[2]) + self._shift
        noise = self._table[at & (_NOISE_SIZE - 1)].unsqueeze(1)
        return torch.addcmul(x, noise, F.conv1d(x, self._weight))


def noise_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[_NOISE_SIZE] standard normal, the same in every process."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(_NOISE_SIZE, generator=seeded).to(device, dtype)


class ResidualUnit:
    """Snake, dilated conv, snake, pointwise conv, around a residual."""

    stride = 1

    def __init__(self, weights: Weights, name: str, dilation: int):
        self._dilated = Conv(weights, f"{name}.1", dilation, Snake(weights, f"{name}.0"))
        self._act = Snake(weights, f"{name}.2")
        self._weight, self._bias = weights.take(f"{name}.3.weight"), weights.take(f"{name}.3.bias")
        self.delay, self.n_values = self._dilated.delay, self._dilated.n_values

    def __call__(self, x: Tensor, tape: ChunkTape) -> Tensor:
        y, centre = self._dilated.with_centre(x, tape)
        return tape.inside(F.conv1d(self._act(y), self._weight, self._bias).add_(centre))
