"""The vocoder's convolutions over chunks, with results equal to those over the whole input.

In: activations of one chunk and the columns before it. Out: final columns.
Owner: FrameDecoder. Weights are copies, folded where two linear steps follow each other.
Source: Qwen3OmniMoeCode2Wav of transformers 5.12, whose modules are read here, never called.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Place = Callable[[Tensor], Tensor]  # copies a weight to the decoder's device and dtype


class ColumnTape:
    """The last input columns of every layer, for one batch: read and rewritten in layer order.

    All layers share one row per stream, so a batch is assembled with a single stack.

    Attributes:
        is_first: whether these are the streams' first chunks; then every column read is zero,
            which is what a causal conv pads with.
    """

    def __init__(self, rows: Tensor, *, is_first: bool):
        """Take rows [n_streams, n_values]; they are not modified."""
        self.is_first = is_first
        self._rows = rows
        self._new_rows = torch.empty_like(rows)
        self._offset = 0

    def extend(self, x: Tensor, n_columns: int, act: "Snake | None" = None) -> Tensor:
        """Return act(x) preceded by the n_columns columns before it, and store its last columns.

        Args:
            x: [n_streams, n_channels, n_new].
        Returns:
            [n_streams, n_channels, n_columns + n_new].
        """
        n_streams, n_channels, n_new = x.shape
        span = slice(self._offset, self._offset + n_channels * n_columns)
        self._offset = span.stop
        shape = (n_streams, n_channels, n_columns)
        joined = x.new_empty(n_streams, n_channels, n_columns + n_new)
        joined[..., :n_columns] = self._rows[:, span].view(shape)
        if act is None:
            joined[..., n_columns:] = x
        else:
            act(x, out=joined[..., n_columns:])  # writing in place saves a pass over the samples
        self._new_rows[:, span].view(shape).copy_(joined[..., n_new:])
        return joined

    def rewritten(self) -> Tensor:
        """Return the rows for the next chunk, [n_streams, n_values]."""
        assert self._offset == self._rows.shape[1], "a layer did not take its columns"
        return self._new_rows


class Snake:
    """x + sin²(αx) / β, with α and β per channel. Source: arXiv:2006.08195."""

    def __init__(self, module: nn.Module, place: Place):
        self._alpha = place(module.alpha.detach().float().exp()[:, None])
        inverse_beta = 1.0 / (module.beta.detach().float().exp() + module.no_div_by_zero)
        self._inverse_beta = place(inverse_beta[:, None])

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [n_streams, n_channels, n]; not modified."""
        ripple = (x * self._alpha).sin_().square_()
        return torch.addcmul(x, ripple, self._inverse_beta, out=out)


class CausalConv:
    """A stride-1 convolution over the current and the (kernel - 1) * dilation earlier columns."""

    def __init__(self, module: nn.Module, place: Place, act: Snake | None = None):
        conv = module.conv
        assert conv.stride == (1,), "a strided conv would need a phase in its state"
        self._weight, self._bias, self._act = place(conv.weight), place(conv.bias), act
        self._dilation, self._groups = conv.dilation[0], conv.groups
        self._n_columns = (conv.kernel_size[0] - 1) * self._dilation
        self.n_values = conv.in_channels * self._n_columns

    def __call__(self, x: Tensor, tape: ColumnTape) -> Tensor:
        """x: [n_streams, in_channels, n]. Returns [n_streams, out_channels, n]."""
        joined = tape.extend(x, self._n_columns, self._act)
        return F.conv1d(
            joined, self._weight, self._bias, dilation=self._dilation, groups=self._groups
        )


class CausalUpsample:
    """A transposed convolution with kernel = stride, or kernel = 2 * stride and trimmed ends.

    With kernel = 2 * stride, input columns i-1 and i together determine output columns
    [i * stride, (i + 1) * stride). So one column before the chunk is the whole overlap. With
    trims_start the first column of a stream emits nothing: a model that trims kernel - stride
    samples on both sides drops exactly those.
    """

    def __init__(
        self, module: nn.Module, place: Place, act: Snake | None = None, *, trims_start: bool
    ):
        conv = module.conv
        self._weight, self._bias, self._act = place(conv.weight), place(conv.bias), act
        self._stride = conv.stride[0]
        self._overlap = conv.kernel_size[0] - self._stride
        assert self._overlap in (0, self._stride), "unknown kernel to stride ratio"
        self._n_columns = 1 if self._overlap else 0
        self._trims_start = trims_start
        self.n_values = conv.in_channels * self._n_columns

    def n_out(self, n_columns: int) -> int:
        """Return how many output columns a whole stream of n_columns input columns has."""
        n_trimmed = self._overlap if self._trims_start else 0
        return max(0, n_columns * self._stride - n_trimmed)

    def __call__(self, x: Tensor, tape: ColumnTape) -> Tensor:
        """x: [n_streams, in_channels, n]. Returns [n_streams, out_channels, n * stride].

        With trims_start a first chunk has stride fewer columns where kernel = 2 * stride.
        """
        joined = tape.extend(x, self._n_columns, self._act)
        if tape.is_first and self._trims_start:
            joined = joined[..., self._n_columns :]
        return F.conv_transpose1d(
            joined, self._weight, self._bias, stride=self._stride, padding=self._overlap
        )


class ConvNeXt:
    """Depthwise conv, norm and a two-layer perceptron, around a residual."""

    def __init__(self, module: nn.Module, place: Place):
        self._depthwise = CausalConv(module.dwconv, place)
        self.n_values = self._depthwise.n_values
        norm, first, second = module.norm, module.pwconv1, module.pwconv2
        # The norm's affine part and the layer's gamma are linear, and fold into the Linear layers.
        self._up = place(first.weight * norm.weight)
        self._up_bias = place(first.bias + first.weight @ norm.bias)
        self._down = place(module.gamma[:, None] * second.weight)
        self._down_bias = place(module.gamma * second.bias)
        self._eps, self._act = norm.eps, module.act

    def __call__(self, x: Tensor, tape: ColumnTape) -> Tensor:
        """x: [n_streams, n_channels, n]. Returns the same shape."""
        h = self._depthwise(x, tape).transpose(1, 2)
        h = F.layer_norm(h, h.shape[-1:], eps=self._eps)
        h = self._act(F.linear(h, self._up, self._up_bias))
        return x + F.linear(h, self._down, self._down_bias).transpose(1, 2)


class ResidualUnit:
    """Snake, dilated conv, snake, pointwise conv, around a residual."""

    def __init__(self, module: nn.Module, place: Place):
        self._dilated = CausalConv(module.conv1, place, Snake(module.act1, place))
        self._act = Snake(module.act2, place)
        pointwise = module.conv2.conv
        self._weight, self._bias = place(pointwise.weight), place(pointwise.bias)
        self.n_values = self._dilated.n_values

    def __call__(self, x: Tensor, tape: ColumnTape) -> Tensor:
        """x: [n_streams, n_channels, n]. Returns the same shape."""
        h = self._act(self._dilated(x, tape))
        return F.conv1d(h, self._weight, self._bias).add_(x)
