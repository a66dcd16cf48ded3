"""KV buffers of a CPU engine that shares them are in a file that other processes can map."""

TARGET = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"
KIND = "around"
SIGNATURE = "(self)"
WHY = "upstream allocates private memory, and shares a pool on CUDA only"
DROP_WHEN = "upstream allocates KV buffers on a CPU through a replaceable allocator"
STAGES = ("thinker", "talker")
CPU_ONLY = True
HOOK = "sglang_live.bridge.platform.kv_memory:create_buffers"
