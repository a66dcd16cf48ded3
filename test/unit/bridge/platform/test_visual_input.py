"""Images and videos that are too large are refused before they are decoded."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from sglang_live.bridge.platform.visual_input import MAX_FRAMES, MAX_PIXELS, check_video, load_image


def png_of(width: int, height: int) -> bytes:
    """A header alone: what is behind it is not looked at."""

    def chunk(name: bytes, body: bytes) -> bytes:
        check = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0"))


def picture(width: int = 8, height: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_an_image_is_decoded_by_sglang():
    seen = []
    load_image(lambda **how: seen.append(how), image_bytes=picture(), gpu_image_decode=False)
    assert seen == [{"image_bytes": picture(), "gpu_image_decode": False}]


@pytest.mark.parametrize(
    ("width", "height"), [(10_000, 5_001), (100_000, 100_000), (60_000_000, 1)]
)
def test_an_image_of_too_many_pixels_never_reaches_the_decoder(width, height):
    def decode(**_how):
        raise AssertionError("decoded")

    assert width * height > MAX_PIXELS
    with pytest.raises(ValueError, match=r"pixels|image"):
        load_image(decode, image_bytes=png_of(width, height))


@pytest.mark.parametrize("data", [b"", b"no picture", picture()[:20]])
def test_bytes_that_are_not_an_image_are_a_value_error(data):
    with pytest.raises(ValueError, match="Could not decode image"):
        load_image(lambda **_how: None, image_bytes=data)


class Video:
    def __init__(self, n_frames: int, shape: tuple[int, int]):
        self.n_frames, self.frame_shape = n_frames, shape

    def __len__(self) -> int:
        return self.n_frames


def test_a_video_within_bounds_and_frames_as_arrays_pass():
    video, frames = Video(300, (1080, 1920)), np.zeros((4, 8, 8, 3))
    assert check_video(video) is video
    assert check_video(frames, use_gpu=False) is frames


@pytest.mark.parametrize("video", [Video(MAX_FRAMES + 1, (10, 10)), Video(10, (4320, 7680))])
def test_a_video_of_too_many_or_too_large_frames_is_refused(video):
    with pytest.raises(ValueError, match="The video has"):
        check_video(video)
