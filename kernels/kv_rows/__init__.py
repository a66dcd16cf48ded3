"""Copy rows of many layers between a device and pinned host memory, in one launch."""

from sglang_live.kernels.kv_rows.kernel import copy_rows

__all__ = ["copy_rows"]
