"""Videos for tests: films whose frames show their number, and noise."""

import base64
import io
from collections.abc import Iterable
from fractions import Fraction

import av
import numpy as np

from sglang_live.core import VideoPart

# Levels of grey from one frame to the next; a codec's errors are less than half of it.
LEVEL = 6


def grey(n_frames: int, width: int = 64, height: int = 48) -> Iterable[np.ndarray]:
    for n in range(n_frames):
        yield np.full((height, width, 3), 10 + LEVEL * (n % 40), np.uint8)


def film(
    frames: Iterable[np.ndarray],
    rate: float = 10,
    container: str = "mp4",
    codec: str = "mpeg4",
    sound: bool = False,
) -> bytes:
    """A file of frames [height, width, 3] uint8, with a second of silence."""
    file, stream, hum = io.BytesIO(), None, None
    with av.open(file, "w", format=container) as out:
        for pixels in frames:
            if stream is None:
                stream = out.add_stream(codec, rate=Fraction(rate).limit_denominator(1000))
                stream.height, stream.width = pixels.shape[:2]
                stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
                stream.bit_rate = 4_000_000
                hum = out.add_stream("aac", rate=8000, layout="mono") if sound else None
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        if hum is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
            silence.sample_rate = 8000
            out.mux(hum.encode(silence))
            out.mux(hum.encode(None))
        if stream is not None:
            out.mux(stream.encode(None))
    return file.getvalue()


def numbers(frames: np.ndarray) -> list[int]:
    """Of grey frames [n, height, width, 3]."""
    return ((frames.mean(axis=(1, 2, 3)) - 10) / LEVEL).round().astype(int).tolist()


def video_uri(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def noise_video(n_frames: int, width: int, height: int, seed: int = 0) -> VideoPart:
    draw = np.random.default_rng(seed)
    return VideoPart(draw.integers(0, 256, (n_frames, height, width, 3), np.uint8))
