"""Videos of clients, decoded within bounds, outside of this process: their frames without sound.

In: bytes, as they were sent, of a file, or of a picture for each frame. Out: frames at even
distances; of a file as transformers 5.19 chooses them for Qwen3-Omni
(Qwen2VLVideoProcessor.sample_frames).
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError
from sglang_live.sound import media, pictures

# One of 4K. Its decoder holds some of them, within the memory of a file's process.
MAX_FRAME_PIXELS = 3840 * 2160
# Of a frame: what the model's processor enlarges is less, what it shrinks is more.
_LEAST_PIXELS, _MOST_PIXELS = 135 * 32 * 32, 768 * 32 * 32
_LEAST_FRAMES = 4
_CONTAINERS = ("mov", "matroska")
HEAD = struct.Struct("<IId")
# Before each picture: its number, and its bytes.
PICTURE = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Decoded:
    """
    frames: [n_frames, height, width, 3] uint8.
    duration_s: of the whole video.
    """

    frames: npt.NDArray[np.uint8]
    duration_s: float


def decode(data: bytes, *, fps: float, max_s: float, most_pixels: int) -> Decoded:
    """Decode the first video stream of an MP4, MOV, WebM or Matroska file.

    Blocks; several threads may call it.

    Args:
        fps: frames of a second, of which the result has an even number; at least four in all.
        max_s: of the video.
        most_pixels: of every second frame together, for which all are scaled down, but not to less
            than what the model makes of a frame in any case.
    Raises:
        BadInputError: it is no such file, is damaged, has no video, is too long or too large, or
            takes more time or memory than a file may; or this server has no PyAV.
        LiveError: the decoder cannot be started.
    """
    container = media.container_of(data)
    if container not in _CONTAINERS:
        raise BadInputError("This is no video: videos are MP4, MOV and WebM files.")
    media.check_installed("video")
    asked = {"container": container, "fps": fps, "max_s": max_s, "most_pixels": most_pixels}
    asked |= {"max_pixels": MAX_FRAME_PIXELS, "max_ratio": media.MAX_RATIO}
    head, *frames = media.decoded(data, asked, "video")
    width, height, duration_s = HEAD.unpack(head)
    found = np.frombuffer(b"".join(frames), np.uint8).reshape(-1, height, width, 3)
    return Decoded(found, duration_s)


def of_pictures(
    files: Sequence[bytes], rate: float, *, fps: float, max_s: float, most_pixels: int
) -> Decoded:
    """Decode a video that comes as PNG and JPEG files, each of which is seen until the next.

    Blocks; several threads may call it. Needs no PyAV.

    Args:
        rate: files of a second. The others: as decode(), but any number of frames.
    Raises:
        BadInputError: one is no such picture, is damaged, or has another size than the first; they
            are too large or last too long, or take more time or memory than a file may.
        LiveError: the decoder cannot be started.
    """
    duration_s = len(files) / rate
    if duration_s > max_s:
        raise BadInputError(f"The video is longer than {max_s:g} s.")
    numbers, places = np.unique(_shown(len(files), rate, fps), return_inverse=True)
    data = bytearray()
    for n in numbers.tolist():
        try:
            pictures.check_kind(files[n])
        except BadInputError as error:
            raise BadInputError(f"Picture {n}: {error}") from None
        data += PICTURE.pack(n, len(files[n])) + files[n]
    asked = {"pictures": len(numbers), "most_pixels": _most_of(len(places), most_pixels)}
    asked |= {"max_pixels": MAX_FRAME_PIXELS, "max_ratio": media.MAX_RATIO}
    sides, *frames = media.decoded(bytes(data), asked, "video")
    width, height, _ = HEAD.unpack(sides)
    found = np.frombuffer(b"".join(frames), np.uint8).reshape(-1, height, width, 3)
    return Decoded(found[places], duration_s)


def _shown(n_files: int, rate: float, fps: float) -> list[int]:
    """Which of n_files at a rate per second is seen at each moment, ascending."""
    n = math.ceil(round(n_files / rate * fps, 6))
    return [min(int(round(k * rate / fps, 6)), n_files - 1) for k in range(n)]


def chosen(n_frames: int, rate: float, fps: float) -> list[int]:
    """Which frames of n_frames at a rate per second are taken, ascending."""
    n = int(min(max(n_frames / rate * fps, _LEAST_FRAMES), n_frames) // 2) * 2 or 1
    # In single precision, as torch.arange has them.
    found: list[int] = (np.arange(n) * (n_frames / n)).astype(np.float32).astype(int).tolist()
    return found


def share_of(width: int, height: int, n_frames: int, most_pixels: int) -> float:
    """Of each side that is left of frames of this size."""
    return float(min(1.0, (_most_of(n_frames, most_pixels) / (width * height)) ** 0.5))


def _most_of(n_frames: int, most_pixels: int) -> int:
    """Pixels of each frame."""
    return max(_LEAST_PIXELS, min(_MOST_PIXELS, most_pixels // -(-n_frames // 2)))
