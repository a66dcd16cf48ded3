"""HiCache's host pool without sgl-kernel: CUDA forgets its memory before it is freed."""

TARGET = "sglang.srt.mem_cache.pool_host.base.HostKVCache.destroy"
KIND = "before"
SIGNATURE = "(self)"
WHY = "upstream unregisters on its own CUDA platform only; freed memory stays registered"
DROP_WHEN = "upstream unregisters whatever memory it registered"
STAGES = ("*",)
CPU_ONLY = True
CUDA_NATIVE = True
HOOK = "sglang_live.bridge.platform.host_pool:unregister"
