"""Media are fetched from public addresses only, and so is what they redirect to."""

TARGET = "sglang.srt.utils.common._assert_media_url_allowed"
KIND = "after"
SIGNATURE = "(url: 'str') -> 'None'"
WHY = "upstream follows a redirect to any host that is on no list: to neighbours of the server"
DROP_WHEN = "upstream refuses private addresses at every hop of a download"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.media_urls:check_public"
