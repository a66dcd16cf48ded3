"""The kernel's reference in plain PyTorch."""

from collections.abc import Sequence

from torch import Tensor


def copy_rows(src_layers: Sequence[Tensor], dst_layers: Sequence[Tensor], rows: Tensor) -> None:
    """Arguments as in kernel.py; all on one device."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[rows[1]] = src[rows[0]]
