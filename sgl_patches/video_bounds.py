"""Refuse a video of too many or too large frames before they are decoded."""

TARGET = "sglang.srt.utils.common.load_video"
KIND = "after"
SIGNATURE = "(video_file: 'Union[str, bytes, VideoData]', use_gpu: 'bool' = True)"
WHY = "upstream samples any number of frames of any size"
DROP_WHEN = "upstream bounds the frames of a video"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.visual_input:check_video"
