"""Copies of KV between a device's pool and the host's, without sgl-kernel.

In: layers and slots from SGLang's transfers, on the scheduler's thread. Out: one launch of
kernels/kv_rows per call. Owner: the device's copy of the last slots of each stream.
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from sglang_live.kernels.kv_rows import copy_rows as copy_by_kernel
from sglang_live.models.host_copy import copy_to

log = logging.getLogger(__name__)

# By stream: the last slots, [2, n], on the host and on the device. Loads ask for the same ones
# layer by layer. The memory is allocated, used and freed in the order of its stream.
_last_rows: dict[int, tuple[Tensor, Tensor]] = {}


def copy_rows(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy rows of every layer; with a device on one side, on the current stream.

    Args:
        src_layers: per layer, [n_slots, n_heads, head_dim].
        dst_layers: as src_layers.
        src_indices: [n] int64 on the CPU, slots.
        dst_indices: as src_indices, without duplicates.
        page_size: tokens per page; not needed here.
    Source: transfer_kv_direct of sgl-kernel, which copies the same rows.
    """
    if not src_layers or not len(src_indices):
        return
    from_, to = src_layers[0].device, dst_layers[0].device
    if from_ == to:
        for src, dst in zip(src_layers, dst_layers, strict=True):
            dst[dst_indices] = src[src_indices]
        return
    on_host, device = (src_layers, to) if from_.type == "cpu" else (dst_layers, from_)
    # A pool is one allocation: all layers are pinned, or none.
    if on_host[0].is_pinned():
        copy_by_kernel(src_layers, dst_layers, _on_device(src_indices, dst_indices, device))
    else:
        _warn_of_pageable_memory()
        _copy_runs(src_layers, dst_layers, src_indices, dst_indices)


def _on_device(src_indices: Tensor, dst_indices: Tensor, device: torch.device) -> Tensor:
    """[2, n]; copied only if they differ from the stream's last ones."""
    stream = torch.cuda.current_stream(device).cuda_stream
    rows = torch.stack((src_indices, dst_indices))
    last = _last_rows.get(stream)
    if last is None or not torch.equal(last[0], rows):
        last = _last_rows[stream] = rows, copy_to(rows, device)
    return last[1]


@cache
def _warn_of_pageable_memory() -> None:
    log.warning("the host's KV pool is not pinned: copies to and from it are slow")


def _copy_runs(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
) -> None:
    for from_, to, n in contiguous_runs(src_indices.tolist(), dst_indices.tolist()):
        for src, dst in zip(src_layers, dst_layers, strict=True):
            dst[to : to + n].copy_(src[from_ : from_ + n], non_blocking=True)


def contiguous_runs(src: Sequence[int], dst: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs that are contiguous on both sides: (first of src, first of dst, length)."""
    runs: list[tuple[int, int, int]] = []
    for from_, to in zip(src, dst, strict=True):
        if runs:
            first, first_to, n = runs[-1]
            if from_ == first + n and to == first_to + n:
                runs[-1] = (first, first_to, n + 1)
                continue
        runs.append((from_, to, 1))
    return runs
