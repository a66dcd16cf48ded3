"""Bounds of images and videos, checked before they are decoded."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

from PIL import Image, UnidentifiedImageError

from sglang_live.sound.pictures import MAX_PIXELS

# Ten minutes at 60 frames per second; models sample a few hundred frames.
MAX_FRAMES = 36_000
MAX_FRAME_PIXELS = 3840 * 2160


def load_image(
    original: Callable[..., Any],
    image_bytes: bytes = b"",
    image_file: str = "",
    gpu_image_decode: Any = True,
) -> Any:
    """Around SGLang's image decoder.

    Raises:
        ValueError: the image has more than MAX_PIXELS, or cannot be decoded.
    """
    if image_file:
        from sglang.srt.utils.common import get_image_bytes

        image_bytes = get_image_bytes(image_file)
    _check_pixels(image_bytes)
    return original(image_bytes=image_bytes, gpu_image_decode=gpu_image_decode)


def check_video(video: Any, *_args: Any, **_options: Any) -> Any:
    """After SGLang has opened a video, whose frames are decoded later.

    Raises:
        ValueError: the video has more than MAX_FRAMES, or frames of more than MAX_FRAME_PIXELS.
    """
    shape = getattr(video, "frame_shape", None)
    if shape is None:
        return video  # a list of frames as arrays
    if len(video) > MAX_FRAMES:
        raise ValueError(f"The video has {len(video)} frames, at most {MAX_FRAMES} are decoded")
    height, width = shape
    if height * width > MAX_FRAME_PIXELS:
        raise ValueError(f"The video has frames of {width} x {height}, at most 3840 x 2160")
    return video


def _check_pixels(image_bytes: bytes) -> None:
    try:
        # This reads the header only. PIL's own bound raises DecompressionBombError.
        with Image.open(BytesIO(image_bytes)) as image:
            width, height = image.size
    except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"Could not decode image: {error}") from error
    if width * height > MAX_PIXELS:
        raise ValueError(f"The image has {width} x {height} pixels, at most {MAX_PIXELS} in all")
