"""Pictures and videos in messages of clients: data URIs, and files, in; ImageContent and VideoPart
out."""

import binascii
import re
from typing import Literal

import pybase64

from sglang_live.core import VIDEO_FPS, ImagePart, VideoPart
from sglang_live.errors import BadInputError
from sglang_live.gateway.call.conversation.items import ImageContent
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.sound import pictures, videos

Detail = Literal["auto", "low", "high"]

# Of one message, or of one HTTP request.
MAX_PICTURES = 16
# A model makes a token of 32 x 32 pixels or so: 256 tokens, and 2048, a session's usual window.
_MOST_PIXELS: dict[Detail, int] = {"low": 512 * 512, "auto": 2048 * 1024, "high": 2048 * 1024}
# Of one HTTP request, which has all of their frames in memory, 12 MB for a thousand tokens; and
# seconds of its videos together.
MAX_VIDEOS, MAX_VIDEO_S = 4, 120.0
# The tokens of a video are those of each second, because two frames make one layer: 4096 tokens,
# but at least 135 for each second. "low": these.
_MOST_VIDEO_PIXELS: dict[Detail, int] = {"low": 0, "auto": 4096 * 1024, "high": 4096 * 1024}
_URI = re.compile(r"data:image/(?:png|jpe?g);base64,", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:[^,]{0,80}", re.IGNORECASE)


def check_number(n: int, path: str) -> None:
    """Raises ClientEventError if there are too many pictures."""
    if n > MAX_PICTURES:
        raise ClientEventError(f"{n} pictures: at most {MAX_PICTURES}.", param=path)


def read_picture(url: str, detail: Detail | None, *, max_bytes: int, path: str) -> ImageContent:
    """Blocks while another process decodes it.

    Args:
        max_bytes: of the file.
        path: of the URI, for errors.
    Raises:
        ClientEventError: it is no data URI of a PNG or JPEG picture within the bounds.
        LiveError: the decoder cannot be started.
    """
    data = _file(url, max_bytes=max_bytes, path=path)
    try:
        decoded = pictures.decode(data, _MOST_PIXELS[detail or "auto"])
    except BadInputError as error:
        raise ClientEventError(str(error), code="invalid_picture", param=path) from None
    return ImageContent(ImagePart(decoded.png, decoded.width, decoded.height), detail or "auto")


def _file(url: str, *, max_bytes: int, path: str) -> bytes:
    """Of a data URI."""
    found = _URI.match(url)
    if found is None:
        scheme = _SCHEME.match(url)
        is_other = f", not {cut(scheme[0])!r}" if scheme else ""
        raise ClientEventError(
            f"{path} must be a data URI with a PNG or JPEG picture in base64{is_other}: this "
            "server fetches no pictures.",
            param=path,
        )
    try:
        data = pybase64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ClientEventError(f"{path} is not base64.", param=path) from None
    if len(data) > max_bytes:
        raise ClientEventError(
            f"The picture has {len(data)} bytes, at most {max_bytes}.",
            code="picture_too_large",
            param=path,
        )
    return data


def read_video(
    data: bytes, detail: Detail | None, *, max_s: float, path: str
) -> tuple[VideoPart, float]:
    """Blocks while another process decodes it.

    Args:
        path: of the file, for errors.
    Returns:
        The video, and its seconds.
    Raises:
        ClientEventError: it is no video within the bounds.
        LiveError: the decoder cannot be started.
    """
    most_pixels = _MOST_VIDEO_PIXELS[detail or "auto"]
    try:
        found = videos.decode(data, fps=VIDEO_FPS, max_s=max_s, most_pixels=most_pixels)
    except BadInputError as error:
        raise ClientEventError(str(error), code="invalid_video", param=path) from None
    return VideoPart(found.frames), found.duration_s


def read_frames(
    urls: list[str], fps: float | None, *, max_s: float, max_bytes: int, path: str
) -> tuple[VideoPart, float]:
    """As read_video, of a picture for each frame.

    Args:
        urls: data URIs. fps: how many of them are a second. max_bytes: of each file.
    """
    files = [_file(url, max_bytes=max_bytes, path=f"{path}[{n}]") for n, url in enumerate(urls)]
    most_pixels = _MOST_VIDEO_PIXELS["auto"]
    try:
        found = videos.of_pictures(
            files, fps or VIDEO_FPS, fps=VIDEO_FPS, max_s=max_s, most_pixels=most_pixels
        )
    except BadInputError as error:
        raise ClientEventError(str(error), code="invalid_video", param=path) from None
    return VideoPart(found.frames), found.duration_s
