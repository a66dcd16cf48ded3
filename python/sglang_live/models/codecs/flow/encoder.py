"""What makes two columns of every code, and looks a few codes ahead: CosyVoice 2's is a conformer.

Streams of different lengths share a batch: they are padded on the right, and only attention and the
first convolution look there. Source: FunAudioLLM/CosyVoice (transformer/upsample_encoder.py, which
is from WeNet and ESPnet), arXiv:1901.02860 for its relative positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow import AHEAD
from sglang_live.models.codecs.flow.layers import CausalConv, Linear, Norm, split_heads, visible
from sglang_live.models.codecs.snac import Weights

UPSAMPLING = 2


class Lookahead:
    """CosyVoice 3's: only convolutions.

    Attributes:
        second: its second convolution.
    """

    def __init__(self, weights: Weights, name: str):
        self._weight = weights.take(f"{name}.conv1.weight")
        self._bias = weights.take(f"{name}.conv1.bias")
        self.second = CausalConv(weights, f"{name}.conv2")
        if (ahead := self._weight.shape[2] - 1) != AHEAD:
            raise BadInputError(f"a flow that looks {ahead} codes ahead, not {AHEAD}")

    def look(self, x: Tensor, n_codes: Tensor) -> Tensor:
        """[n_streams, n_positions, width] of this shape; right where all ahead is known, and at a
        stream's end."""
        at = torch.arange(x.shape[1], device=x.device)
        x = x.masked_fill((at >= n_codes[:, None])[..., None], 0.0)
        return self.second(self.seen(F.pad(x, (0, 0, 0, AHEAD)))) + x

    def seen(self, x: Tensor) -> Tensor:
        """What the first convolution says of all but the last positions, which are ahead."""
        found = F.conv1d(x.transpose(1, 2), self._weight, self._bias)
        return F.leaky_relu(found).transpose(1, 2)

    def __call__(
        self, x: Tensor, n_codes: Tensor, lengths: Tensor, chunks: Tensor, longest: int
    ) -> Tensor:
        """See Encoder."""
        return self.look(x, n_codes)[:, :longest].repeat_interleave(UPSAMPLING, 1)


class Encoder:
    def __init__(self, weights: Weights, name: str):
        self._embed = _Embedding(weights, f"{name}.embed.out")
        self._lookahead = Lookahead(weights, f"{name}.pre_lookahead_layer")
        self._layers = _layers(weights, f"{name}.encoders")
        self._up = CausalConv(weights, f"{name}.up_layer.conv")
        self._up_embed = _Embedding(weights, f"{name}.up_embed.out")
        self._up_layers = _layers(weights, f"{name}.up_encoders")
        self._norm = Norm(weights, f"{name}.after_norm")
        self._to_mel = Linear(weights, f"{name}_proj")

    def __call__(
        self, x: Tensor, n_codes: Tensor, lengths: Tensor, chunks: Tensor, longest: int
    ) -> Tensor:
        """
        Args:
            x: [n_streams, n_positions, width], embeddings of codes.
            n_codes: [n_streams], those of each stream.
            lengths: [n_streams], codes of it that have columns: all, or without those ahead.
            chunks: [n_streams], codes to which attention is cut.
            longest: of lengths.
        Returns:
            [n_streams, UPSAMPLING * longest, n_mels].
        """
        x = self._lookahead.look(self._embed(x), n_codes)[:, :longest]
        x = _through(self._layers, x, lengths, chunks)
        x = self._up_embed(self._up(x.repeat_interleave(UPSAMPLING, 1)))
        x = _through(self._up_layers, x, UPSAMPLING * lengths, UPSAMPLING * chunks)
        return self._to_mel(self._norm(x))


class BlockEncoder:
    """GLM-4-Voice's: CosyVoice 1's, without what looks ahead, and cut into blocks."""

    def __init__(self, weights: Weights, name: str):
        self._embed = _Embedding(weights, f"{name}.embed.out")
        self._layers = _layers(weights, f"{name}.encoders", 1e-5)
        self._norm = Norm(weights, f"{name}.after_norm")
        self._to_mel = Linear(weights, f"{name}_proj")

    def __call__(self, x: Tensor, block: int) -> Tensor:
        """[n_streams, n_codes, n_mels] of embeddings [n_streams, n_codes, width].

        block: codes to which attention is cut.
        """
        lengths, blocks = (torch.full((len(x),), n, device=x.device) for n in (x.shape[1], block))
        return self._to_mel(self._norm(_through(self._layers, self._embed(x), lengths, blocks)))


class _Embedding:
    def __init__(self, weights: Weights, name: str):
        self._linear, self._norm = Linear(weights, f"{name}.0"), Norm(weights, f"{name}.1")

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(self._linear(x)) * math.sqrt(self._linear.weight.shape[0])


class ConformerLayer:
    def __init__(self, weights: Weights, name: str, eps: float = 1e-12):
        self._attention_norm = Norm(weights, f"{name}.norm_mha", eps)
        attention = f"{name}.self_attn"
        self._q, self._k, self._v, self._out, self._place = (
            Linear(weights, f"{attention}.linear_{part}") for part in ("q", "k", "v", "out", "pos")
        )
        self._content_bias = weights.take(f"{attention}.pos_bias_u")
        self._place_bias = weights.take(f"{attention}.pos_bias_v")
        self._head_dim = self._content_bias.shape[1]
        self._forward_norm = Norm(weights, f"{name}.norm_ff", eps)
        self._wide = Linear(weights, f"{name}.feed_forward.w_1")
        self._narrow = Linear(weights, f"{name}.feed_forward.w_2")

    def __call__(self, x: Tensor, distances: Tensor, seen: Tensor) -> Tensor:
        return self.behind(x, self.mix(*self.project(x), distances, seen))

    def nothing(self) -> Tensor:
        """Keys and values of no positions, [2, n_heads, 0, head_dim]."""
        n_heads, dim = self._content_bias.shape
        return self._content_bias.new_zeros(2, n_heads, 0, dim)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [n_streams, n_heads, n_positions, head_dim]."""
        normed = self._attention_norm(x)
        query, key, value = (
            split_heads(part(normed), self._head_dim) for part in (self._q, self._k, self._v)
        )
        return query, key, value

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, distances: Tensor, seen: Tensor | None
    ) -> Tensor:
        """What each of n queries finds, of its shape; they are the last ones of n_keys positions.

        Args:
            distances: of them, see distances_of.
            seen: [n_streams, 1, n, n_keys] bool; None: all.
        """
        n, n_keys, dim = query.shape[2], key.shape[2], self._head_dim
        places = split_heads(self._place(distances)[None], dim)
        scores = (query + self._place_bias[:, None]) @ places.transpose(2, 3)
        # Row i has the distances n_keys - 1 to 1 - n, of which key j is at n_keys - n + i - j.
        strides = (*scores.stride()[:2], n_keys + n - 2, 1)
        bias = scores.as_strided((*scores.shape[:2], n, n_keys), strides, n - 1) / math.sqrt(dim)
        if seen is not None:
            bias = bias.masked_fill(~seen, -math.inf)
        content = query + self._content_bias[:, None]
        return F.scaled_dot_product_attention(content, key, value, attn_mask=bias)

    def behind(self, x: Tensor, found: Tensor) -> Tensor:
        """x: as given to project; found: of its queries."""
        x = x + self._out(found.transpose(1, 2).flatten(2))
        return x + self._narrow(F.silu(self._wide(self._forward_norm(x))))


def _layers(weights: Weights, name: str, eps: float = 1e-12) -> list[ConformerLayer]:
    return [ConformerLayer(weights, f"{name}.{i}", eps) for i in range(weights.count(name))]


def _through(layers: list[ConformerLayer], x: Tensor, lengths: Tensor, chunks: Tensor) -> Tensor:
    n, width = x.shape[1:]
    seen = visible(lengths, chunks, n)
    distances = distances_of(n, n, width, x.device).to(x.dtype)
    for layer in layers:
        x = layer(x, distances, seen)
    return x


def distances_of(n: int, n_keys: int, width: int, device: torch.device) -> Tensor:
    """[n + n_keys - 1, width], sines and cosines of the distances n_keys - 1 to 1 - n in turn."""
    steps = torch.arange(0, width, 2, device=device)
    rates = torch.exp(steps * -(math.log(10_000.0) / width))
    angles = torch.arange(n_keys - 1, -n, -1, device=device)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), 2).flatten(1)
