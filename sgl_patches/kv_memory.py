"""KV buffers of an engine that shares them are in memory that other processes can map."""

TARGET = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"
KIND = "around"
SIGNATURE = "(self)"
WHY = "upstream allocates memory that only its own process can use"
DROP_WHEN = "upstream allocates KV buffers through a replaceable allocator"
STAGES = ("thinker", "talker")
CPU_ONLY = False
HOOK = "sglang_live.bridge.memory.kv_memory:create_buffers"
