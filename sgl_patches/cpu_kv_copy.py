"""HiCache's copy between tiers as index copies: on CPU both tiers are host memory."""

TARGET = "sglang.srt.mem_cache.pool_host.mha.transfer_kv_direct"
KIND = "define"
SIGNATURE = None
WHY = "the copy kernel is imported from sgl_kernel only on CUDA and ROCm"
DROP_WHEN = "upstream has a torch fallback for the direct backend"
STAGES = ("*",)
CPU_ONLY = True


def HOOK(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copy rows src_indices -> dst_indices (token slots, [n] int64) in every layer."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]
