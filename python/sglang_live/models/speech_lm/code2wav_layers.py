"""Layers of codecs over chunks, with results equal to those over the whole input.

In: activations of one chunk, and the columns before it or each layer's window of past keys and
values. Out: final columns.
Owner: FrameDecoder, and Mimi's encoder. Weights are copies, folded where two linear steps follow
each other.
Source: Qwen3OmniMoeCode2Wav and MimiModel of transformers, whose modules are read here, never
called.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Place = Callable[[Tensor], Tensor]  # copies a weight to the decoder's device and dtype


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Inputs that all layers share for one chunk.

    Attributes:
        mask: [n_streams or 1, 1, n_new, n_past + n_new] bool, or None when all is visible.
        cos, sin: [n_new, head_dim], the rotation of the chunk's own positions.
    """

    mask: Tensor | None
    cos: Tensor
    sin: Tensor


class WindowTransformer:
    """All transformer layers, and the final norm if there is one.

    Keys are kept unrotated, and positions are counted from the start of the window. Attention
    sees only differences of positions, so this equals positions counted from the start of the
    stream, without their float32 rounding in sessions that last for hours, and one table serves
    streams of all ages.
    """

    def __init__(self, module: nn.Module, place: Place):
        config = module.config
        if config.rope_parameters["rope_type"] != "default":
            raise ValueError(f"unsupported rope_type {config.rope_parameters['rope_type']!r}")
        self.n_layers = config.num_hidden_layers
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = module.layers[0].self_attn.head_dim
        self.n_window_frames = config.sliding_window
        self._layers = [_Layer(layer, place) for layer in module.layers[: self.n_layers]]
        self._norm = place(module.norm.weight) if hasattr(module, "norm") else None
        self._eps = config.rms_norm_eps if self._norm is not None else 0.0
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        frequency = config.rope_parameters["rope_theta"] ** -exponent
        self._frequency = frequency.to(self._layers[0].device)

    def __call__(
        self, hidden: Tensor, past: Tensor, first_real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the chunk through all layers.

        Args:
            hidden: [n_streams, n_new, hidden_size].
            past: [n_streams, n_layers, 2 * n_kv_heads, n_past, head_dim], keys before values,
                oldest first, padded on the left for streams with fewer than n_past frames.
            first_real: [n_streams], index of the first of the n_past that is not padding. None:
                no stream is padded.
        Returns:
            hidden states like `hidden`, and the chunk's keys and values,
            [n_streams, n_layers, 2 * n_kv_heads, n_new, head_dim].
        """
        n_new, n_past = hidden.shape[1], past.shape[3]
        cos, sin = self._rotation(n_past + n_new, hidden)
        chunk = _Chunk(
            self._mask(n_past, n_new, first_real, hidden.device), cos[n_past:], sin[n_past:]
        )
        past_k, past_v = past.split(self.n_kv_heads, dim=2)
        past_k = _rotate(past_k, cos[:n_past], sin[:n_past])
        fresh = []
        for i, layer in enumerate(self._layers):
            hidden, kv = layer(hidden, past_k[:, i], past_v[:, i], chunk)
            fresh.append(kv)
        if self._norm is not None:
            hidden = F.rms_norm(hidden, self._norm.shape, self._norm, self._eps)
        return hidden, torch.stack(fresh, dim=1)

    def new_past(self, like: Tensor) -> Tensor:
        """The window of a new stream, [n_layers, 2 * n_kv_heads, 0, head_dim]."""
        return like.new_zeros(self.n_layers, 2 * self.n_kv_heads, 0, self.head_dim)

    def gather(self, windows: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The streams' windows right-aligned in one tensor, as long as the longest.

        Returns:
            past and first_real of a call.
        """
        ages = [window.shape[2] for window in windows]
        n_past = max(ages)
        n_layers, n_heads, _, head_dim = windows[0].shape
        past = windows[0].new_zeros(len(windows), n_layers, n_heads, n_past, head_dim)
        for row, window, age in zip(past, windows, ages, strict=True):
            row[:, :, n_past - age :] = window
        if all(age == n_past for age in ages):
            return past, None
        return past, torch.tensor([n_past - age for age in ages], device=past.device)

    def grown(self, window: Tensor, fresh: Tensor) -> Tensor:
        """A stream's window behind a chunk, in memory of its own: a view would keep the batch.

        Args:
            fresh: [n_layers, 2 * n_kv_heads, n_new, head_dim], of the chunk.
        """
        n_keep, n_fresh = self.n_window_frames - 1, fresh.shape[2]
        kept = window[:, :, max(0, window.shape[2] + n_fresh - n_keep) :]
        return torch.cat((kept, fresh[:, :, max(0, n_fresh - n_keep) :]), dim=2)

    def _rotation(self, n_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # A float32 angle of some hundred positions is off by 1e-5, which the layers amplify.
        positions = torch.arange(n_positions, dtype=torch.float64, device=like.device)
        angle = torch.outer(positions, self._frequency).repeat(1, 2)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)

    def _mask(
        self, n_past: int, n_new: int, first_real: Tensor | None, device: torch.device
    ) -> Tensor | None:
        if n_new == 1 and first_real is None:
            return None  # past never exceeds the window, so one new frame sees all of it
        key = torch.arange(n_past + n_new, device=device)
        query = key[n_past:, None]
        visible = (key <= query) & (key > query - self.n_window_frames)
        if first_real is None:
            return visible[None, None]
        return (visible & (key >= first_real[:, None, None]))[:, None]


class _Layer:
    """One transformer layer, with the norms' affine parts and layer scales folded into its
    matrices."""

    def __init__(self, module: nn.Module, place: Place):
        attention = module.self_attn
        norm = module.input_layernorm
        self._qkv, self._qkv_bias = _behind(
            norm, [attention.q_proj, attention.k_proj, attention.v_proj], place
        )
        scale = module.self_attn_layer_scale.scale
        self._out = place(scale[:, None] * attention.o_proj.weight)
        has_bias = attention.o_proj.bias is not None
        self._out_bias = place(scale * attention.o_proj.bias) if has_bias else None
        self._mlp = _Mlp(module, place)
        self._normed = _normed_as(norm)
        self.device = self._out.device
        self._head_dim = attention.head_dim
        self._n_kv_heads = attention.k_proj.out_features // attention.head_dim
        self._n_heads = attention.q_proj.out_features // attention.head_dim

    def __call__(
        self, hidden: Tensor, past_k: Tensor, past_v: Tensor, chunk: _Chunk
    ) -> tuple[Tensor, Tensor]:
        """hidden: [n_streams, n_new, hidden_size]; past_k (rotated) and past_v:
        [n_streams, n_kv_heads, n_past, head_dim]. Returns hidden and the chunk's unrotated keys
        and values, [n_streams, 2 * n_kv_heads, n_new, head_dim].
        """
        qkv = F.linear(self._normed(hidden), self._qkv, self._qkv_bias)
        qkv = qkv.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        n_kv = self._n_kv_heads
        qk = _rotate(qkv[:, :-n_kv], chunk.cos, chunk.sin)
        attended = F.scaled_dot_product_attention(
            qk[:, :-n_kv],
            torch.cat((past_k, qk[:, -n_kv:]), dim=2),
            torch.cat((past_v, qkv[:, -n_kv:]), dim=2),
            attn_mask=chunk.mask,
            enable_gqa=n_kv != self._n_heads,
        )
        attended = attended.transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(attended, self._out, self._out_bias)
        return hidden + self._mlp(hidden), qkv[:, self._n_heads :]


class _Mlp:
    """The norm, and the feed-forward part behind it, with a gate if the module has one."""

    def __init__(self, module: nn.Module, place: Place):
        mlp, norm, scale = module.mlp, module.post_attention_layernorm, module.mlp_layer_scale.scale
        self._gated = hasattr(mlp, "gate_proj")
        inner = [mlp.gate_proj, mlp.up_proj] if self._gated else [mlp.fc1]
        self._in, self._in_bias = _behind(norm, inner, place)
        self._out = place(scale[:, None] * (mlp.down_proj if self._gated else mlp.fc2).weight)
        self._act = mlp.act_fn if self._gated else mlp.activation_fn
        self._normed = _normed_as(norm)

    def __call__(self, x: Tensor) -> Tensor:
        inner = F.linear(self._normed(x), self._in, self._in_bias)
        if not self._gated:
            return F.linear(self._act(inner), self._out)
        gate, up = inner.chunk(2, dim=-1)
        return F.linear(self._act(gate) * up, self._out)


def _behind(norm: nn.Module, layers: list[nn.Linear], place: Place) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linear layers in one, with the affine part of the norm before them."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    if isinstance(norm, nn.LayerNorm):
        shift = weight @ norm.bias
        bias = shift if bias is None else bias + shift
    return place(weight * norm.weight), None if bias is None else place(bias)


def _normed_as(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The norm without its affine part, which is folded into the next matrix."""
    if isinstance(norm, nn.LayerNorm):
        return lambda x: F.layer_norm(x, x.shape[-1:], eps=norm.eps)
    eps: float = norm.variance_epsilon
    return lambda x: F.rms_norm(x, x.shape[-1:], eps=eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE, halves convention. x: [..., n, head_dim]; cos, sin: [n, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


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

    def extend(self, x: Tensor, n_columns: int, act: "Act | None" = None) -> Tensor:
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


class Elu:
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = F.elu(x)
        return y if out is None else out.copy_(y)


Act = Snake | Elu


class CausalConv:
    """A convolution over the current columns and those before them.

    Attributes:
        n_columns: before the chunk, kernel - stride without dilation.
        stride: chunks have a multiple of it, so that the state needs no phase.
    """

    def __init__(self, module: nn.Module, place: Place, act: Act | None = None):
        conv = module.conv
        self._weight = place(conv.weight)
        self._bias = None if conv.bias is None else place(conv.bias)
        self._act = act
        self.stride = conv.stride[0]
        self._dilation = conv.dilation[0]
        self._groups = conv.groups
        self.n_columns = (conv.kernel_size[0] - 1) * self._dilation + 1 - self.stride
        self.n_values = conv.in_channels * self.n_columns

    def __call__(self, x: Tensor, tape: ColumnTape) -> Tensor:
        """x: [n_streams, in_channels, n]. Returns [n_streams, out_channels, n / stride]."""
        assert x.shape[2] % self.stride == 0, "the chunk ends inside a step of the convolution"
        return F.conv1d(
            tape.extend(x, self.n_columns, self._act),
            self._weight,
            self._bias,
            stride=self.stride,
            dilation=self._dilation,
            groups=self._groups,
        )


class CausalUpsample:
    """A transposed convolution with kernel = stride, or kernel = 2 * stride and trimmed ends.

    With kernel = 2 * stride, input columns i-1 and i together determine output columns
    [i * stride, (i + 1) * stride). So one column before the chunk is the whole overlap. With
    trims_start the first column of a stream emits nothing: a model that trims kernel - stride
    samples on both sides drops exactly those.
    """

    def __init__(
        self, module: nn.Module, place: Place, act: Act | None = None, *, trims_start: bool
    ):
        conv = module.conv
        self._weight = place(conv.weight)
        self._bias = None if conv.bias is None else place(conv.bias)
        self._act = act
        self._groups = conv.groups
        self.stride = conv.stride[0]
        self._overlap = conv.kernel_size[0] - self.stride
        assert self._overlap in (0, self.stride), "unknown kernel to stride ratio"
        self.n_columns = 1 if self._overlap else 0
        self._trims_start = trims_start
        self.n_values = conv.in_channels * self.n_columns

    def n_out(self, n_columns: int) -> int:
        """Return how many output columns a whole stream of n_columns input columns has."""
        n_trimmed = self._overlap if self._trims_start else 0
        return max(0, n_columns * self.stride - n_trimmed)

    def __call__(self, x: Tensor, tape: ColumnTape) -> Tensor:
        """x: [n_streams, in_channels, n]. Returns [n_streams, out_channels, n * stride].

        With trims_start a first chunk has stride fewer columns where kernel = 2 * stride.
        """
        joined = tape.extend(x, self.n_columns, self._act)
        if tape.is_first and self._trims_start:
            joined = joined[..., self.n_columns :]
        return F.conv_transpose1d(
            joined,
            self._weight,
            self._bias,
            stride=self.stride,
            padding=self._overlap,
            groups=self._groups,
        )


class ConvNeXt:
    """Depthwise conv, norm and a two-layer perceptron, around a residual."""

    def __init__(self, module: nn.Module, place: Place):
        self._depthwise = CausalConv(module.dwconv, place)
        self.n_columns = self._depthwise.n_columns
        self.n_values = self._depthwise.n_values
        norm, first, second = module.norm, module.pwconv1, module.pwconv2
        # The norm's affine part and the layer's gamma are linear, and fold into the Linear layers.
        self._up = place(first.weight * norm.weight)
        self._up_bias = place(first.bias + first.weight @ norm.bias)
        self._down = place(module.gamma[:, None] * second.weight)
        self._down_bias = place(module.gamma * second.bias)
        self._eps = norm.eps
        self._act = module.act

    def __call__(self, x: Tensor, tape: ColumnTape) -> Tensor:
        """x: [n_streams, n_channels, n]. Returns the same shape."""
        h = self._depthwise(x, tape).transpose(1, 2)
        h = F.layer_norm(h, h.shape[-1:], eps=self._eps)
        h = self._act(F.linear(h, self._up, self._up_bias))
        return x + F.linear(h, self._down, self._down_bias).transpose(1, 2)


class ResidualUnit:
    """Activation, dilated conv, activation, pointwise conv, around a residual."""

    def __init__(
        self,
        dilated: nn.Module,
        pointwise: nn.Module,
        place: Place,
        acts: tuple[Act, Act],
    ):
        self._dilated = CausalConv(dilated, place, acts[0])
        self._act = acts[1]
        self._weight = place(pointwise.conv.weight)
        self._bias = place(pointwise.conv.bias)
        self.n_columns = self._dilated.n_columns
        self.n_values = self._dilated.n_values

    def __call__(self, x: Tensor, tape: ColumnTape) -> Tensor:
        """x: [n_streams, n_channels, n]. Returns the same shape."""
        h = self._act(self._dilated(x, tape))
        return F.conv1d(h, self._weight, self._bias).add_(x)
