"""Copies of KV between a device's pool and the host's, in PyTorch's own operators."""

from collections.abc import Sequence

from torch import Tensor


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
        dst_indices: as src_indices.
        page_size: tokens per page; not needed here.
    Source: transfer_kv_direct of sgl-kernel, which copies the same runs.
    """
    if not src_layers:
        return
    if src_layers[0].device == dst_layers[0].device:
        for src, dst in zip(src_layers, dst_layers, strict=True):
            dst[dst_indices] = src[src_indices]
        return
    for from_, to, n in contiguous_runs(src_indices.tolist(), dst_indices.tolist()):
        for src, dst in zip(src_layers, dst_layers, strict=True):
            # The host's pool is pinned: the copy is one transfer that the host does not wait for.
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
