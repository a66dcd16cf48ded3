"""A radix cache whose sessions can be compacted, in SGLang's registry."""

TARGET = "sglang.srt.mem_cache.registry._RADIX_CACHE_REGISTRY"
KIND = "item"
SIGNATURE = None
WHY = "SGLang's sessions keep every token until they close, and fail at the context limit"
DROP_WHEN = "SGLang's streaming sessions can drop tokens between a sink and a window"
STAGES = ("thinker",)
CPU_ONLY = False
WITH_POLICIES = True
HOOK = "sglang_live.bridge.cache.radix:REGISTRY_ITEM"
