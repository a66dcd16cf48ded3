"""Media are downloaded from the addresses that were checked to be public."""

TARGET = "sglang.srt.utils.common.get_mm_http_session"
KIND = "after"
SIGNATURE = "() -> 'requests.Session'"
WHY = "upstream resolves the host again to connect, and may get another address"
DROP_WHEN = "upstream connects to the address that it checked"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.media_urls:with_public_connections"
