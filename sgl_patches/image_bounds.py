"""Refuse an image of too many pixels before it is decoded."""

TARGET = "sglang.srt.utils.common._load_image"
KIND = "around"
SIGNATURE = (
    "(image_bytes: 'bytes' = b'', image_file: 'str' = '',"
    " gpu_image_decode: 'GPUImageDecodeMode' = True)"
    " -> 'Union[torch.Tensor, Image.Image]'"
)
WHY = "an image of 100 KB may have a gigabyte of pixels, and upstream decodes them all"
DROP_WHEN = "upstream bounds the pixels of an image"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.visual_input:load_image"
