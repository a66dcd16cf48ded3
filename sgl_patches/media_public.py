"""Media are fetched from public addresses only, redirects included."""

TARGET = "sglang.srt.utils.common._assert_media_url_allowed"
KIND = "after"
SIGNATURE = "(url: 'str') -> 'None'"
WHY = "upstream follows a redirect to any unlisted host, also in the server's network"
DROP_WHEN = "upstream refuses private addresses at every hop of a download"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.media_urls:check_public"
