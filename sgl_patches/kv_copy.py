"""HiCache's copy between tiers without sgl-kernel."""

from sglang_live.bridge.platform.kv_copy import copy_rows

TARGET = "sglang.srt.mem_cache.pool_host.mha.transfer_kv_direct"
KIND = "define"
SIGNATURE = None
WHY = "the copy kernel is imported from sgl_kernel only on CUDA and ROCm"
DROP_WHEN = "upstream has a torch fallback for the direct backend"
STAGES = ("*",)
CPU_ONLY = True
CUDA_NATIVE = True
HOOK = copy_rows
