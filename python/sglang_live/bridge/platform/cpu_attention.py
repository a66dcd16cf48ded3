"""Reference attention of a prefill chunk without a GPU, for the chunk's own positions only.

Upstream computes every earlier position again with every chunk, so the cost of a chunk is
quadratic in its context: seconds behind 20,000 tokens, while its own rows take 0.1 s.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def own_rows(
    upstream: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Around TorchNativeAttnBackend._run_sdpa_forward_extend, for plain causal attention.

    Args:
        query: [n_tokens, n_heads, head_dim].
        output: of the query's shape; the result is written into it.
        k_cache: [n_slots, n_kv_heads, head_dim].
        v_cache: as k_cache.
    """
    windowed = sliding_window_size is not None and sliding_window_size > -1
    if not causal or is_cross_attn or encoder_lens is not None or windowed:
        return upstream(
            *(backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
            *(extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa, causal),
            *(is_cross_attn, sliding_window_size),
        )
    start = 0
    rows, lengths = req_pool_indices.tolist(), seq_lens.tolist()
    for row, length, n in zip(rows, lengths, extend_seq_lens.tolist(), strict=True):
        tokens = req_to_token[row, :length]
        out = _attend(
            query[start : start + n].movedim(0, 1),
            k_cache[tokens].movedim(0, 1).to(query.dtype),
            v_cache[tokens].movedim(0, 1).to(query.dtype),
            scaling,
            enable_gqa,
        )
        output[start : start + n] = out.movedim(1, 0)
        start += n
    return output


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, gqa: bool
) -> torch.Tensor:
    """query: [n_heads, n, head_dim], the last n of the positions in key and value."""
    n, length = query.shape[1], key.shape[1]
    # Row i of the mask is row i + 1 shifted by one. With the queries in reverse order all rows are
    # views of one vector, and the mask takes no memory.
    line = torch.zeros(length + n - 1, dtype=query.dtype, device=query.device)
    line[length:] = float("-inf")
    out = scaled_dot_product_attention(
        query.flip(1).unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=line.as_strided((n, length), (1, 1)),
        scale=scale,
        enable_gqa=gqa,
    )
    return out.squeeze(0).flip(1)
