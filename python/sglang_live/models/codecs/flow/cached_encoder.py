"""The conformer of a flow whose streams keep state: each position is computed once.

Source: stepfun-ai/Step-Audio2 (cosyvoice2/transformer/upsample_encoder_v2.py: forward_chunk).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_live.models.codecs.flow.encoder import (
    UPSAMPLING,
    ConformerLayer,
    Encoder,
    distances_of,
)
from sglang_live.models.host_copy import copy_to

Kept = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderState:
    """Of one stream.

    ahead, up: [n, width], the last positions that each convolution has seen.
    keys, up_keys: of each layer the keys and values of all positions, [2, n_heads, n, head_dim].
    """

    ahead: Tensor
    up: Tensor
    keys: Kept
    up_keys: Kept


class CachedEncoder(Encoder):
    def nothing(self) -> EncoderState:
        """The state before a stream."""
        empty = [tuple(layer.nothing() for layer in x) for x in (self._layers, self._up_layers)]
        return EncoderState(self._lookahead.second.nothing(), self._up.nothing(), *empty)

    def chunk(
        self, x: Tensor, n_codes: Sequence[int], lengths: Sequence[int], states: list[EncoderState]
    ) -> tuple[Tensor, list[EncoderState]]:
        """
        Args:
            x: [n_streams, n_positions, width], embeddings of codes, as many as those of the longest
                stream that have columns, and the look-ahead.
            n_codes: those of each stream.
            lengths: codes of it that have columns.
        Returns:
            [n_streams, UPSAMPLING * (n_positions - ahead), n_mels], and the states behind.
        """
        at = torch.arange(x.shape[1], device=x.device)
        ends = copy_to(torch.tensor(n_codes), x.device)
        x = self._embed(x).masked_fill((at >= ends[:, None])[..., None], 0.0)
        before = torch.stack([state.ahead for state in states])
        seen = self._lookahead.seen(x)
        x = self._lookahead.second(seen, before) + x[:, : seen.shape[1]]
        aheads = _last(before, seen, lengths)
        x, keys = _through(self._layers, x, lengths, [state.keys for state in states])
        x, columns = x.repeat_interleave(UPSAMPLING, 1), [UPSAMPLING * n for n in lengths]
        before = torch.stack([state.up for state in states])
        ups = _last(before, x, columns)
        x = self._up_embed(self._up(x, before))
        x, up_keys = _through(self._up_layers, x, columns, [state.up_keys for state in states])
        behind = map(EncoderState, aheads, ups, keys, up_keys)
        return self._to_mel(self._norm(x)), list(behind)


def _last(before: Tensor, x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Of each stream the last positions, as many as `before` has."""
    n = before.shape[1]
    rows = zip(torch.cat((before, x), 1), lengths, strict=True)
    # Copies: views would keep the batch alive.
    return [row[length : length + n].clone() for row, length in rows]


def _through(
    layers: list[ConformerLayer], x: Tensor, lengths: Sequence[int], before: list[Kept]
) -> tuple[Tensor, list[Kept]]:
    """Each position sees all before it, and all of its chunk."""
    kept: list[list[Tensor]] = [[] for _ in lengths]
    distances = [
        distances_of(n, known[0].shape[2] + n, x.shape[2], x.device).to(x.dtype)
        for n, known in zip(lengths, before, strict=True)
    ]
    for i, layer in enumerate(layers):
        query, key, value = layer.project(x)
        found = torch.zeros_like(query)
        for row, n in enumerate(lengths):
            fresh = torch.stack((key[row, :, :n], value[row, :, :n]))
            joined = torch.cat((before[row][i], fresh), 2)
            kept[row].append(joined)
            keys, values = joined.unsqueeze(1)
            asked = query[row : row + 1, :, :n]
            found[row, :, :n] = layer.mix(asked, keys, values, distances[row], None)[0]
        x = layer.behind(x, found)
    return x, [tuple(each) for each in kept]
