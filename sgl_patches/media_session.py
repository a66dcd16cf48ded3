"""Media are downloaded from the very addresses that were found to be public."""

TARGET = "sglang.srt.utils.common.get_mm_http_session"
KIND = "after"
SIGNATURE = "() -> 'requests.Session'"
WHY = "upstream resolves a host again to connect: a name server may give it another address then"
DROP_WHEN = "upstream connects to the address that it has checked"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.media_urls:with_public_connections"
