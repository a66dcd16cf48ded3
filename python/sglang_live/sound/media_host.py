"""Decodes sound and videos with PyAV, pictures with Pillow, and encodes speech, one forked process
for each.

    python -m sglang_live.sound.media_host FD      started by media.py

In: over a packet socket, the container and two descriptors, of the file and of a pipe. Out, to the
pipe: DECODED blocks of int16, or of the file, or frames, and ENDED, or REFUSED with a reason;
nothing more from a process that was killed at a limit. A process can open neither files nor
sockets, cannot start another one, and is killed by the kernel when its time is over.
"""

import array
import ctypes
import io
import json
import os
import resource
import signal
import socket
import sys
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageFile, ImageOps, MpoImagePlugin, TiffImagePlugin

from sglang_live.sound.media import (
    CPU_S,
    DECODED,
    ENDED,
    MEMORY_BYTES,
    REFUSED,
    WALL_S,
    is_installed,
)
from sglang_live.sound.videos import HEAD, PICTURE, chosen, share_of

if is_installed():
    import av
    from av.stream import Disposition
    from av.video.reformatter import Interpolation

    _DAMAGED: tuple[type[Exception], ...] = (av.FFmpegError, MemoryError)
else:
    _DAMAGED = (MemoryError,)

_NO_NEW_PRIVILEGES, _DUMPABLE = 38, 4  # of prctl
_ASKED_BYTES = 4096
_AAC_BIT_RATE = 64_000  # of speech, transparent
_WRITE: Literal["w"] = "w"  # of PyAV, whose files are always bytes


class _UnusableError(Exception):
    """Told to the client."""


def main(descriptor: int) -> None:
    _warm_up()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the server ends first
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for the forked processes
    with socket.socket(fileno=descriptor) as requests:
        while True:
            asked, files = _receive(requests)
            if not asked:
                return
            if os.fork() == 0:
                requests.close()
                _work_and_exit(json.loads(asked), *files)
            for file in files:
                os.close(file)


def _receive(requests: socket.socket) -> tuple[bytes, list[int]]:
    passed = array.array("i")
    asked, rights, _, _ = requests.recvmsg(_ASKED_BYTES, socket.CMSG_SPACE(2 * passed.itemsize))
    for _, _, data in rights:
        passed.frombytes(data)
    return asked, passed.tolist()


def _warm_up() -> None:
    """What is imported only when it is used, is imported before files can no longer be opened."""
    Image.preinit()
    Image.MAX_IMAGE_PIXELS = None  # that of a request is lower
    assert ImageFile and MpoImagePlugin and TiffImagePlugin  # of JPEG files, and their orientation
    if not is_installed():
        return
    file = io.BytesIO()
    _encode(io.BytesIO(bytes(16_000)), file, "adts", 8000)
    file.seek(0)
    with av.open(file, format="aac") as source:
        for _ in _blocks(source, 16_000):
            pass


def _work_and_exit(asked: dict[str, Any], source: int, results: int) -> None:
    status = 1
    try:
        with os.fdopen(results, "wb", buffering=0) as out:
            try:
                _limit()
                if "encode" in asked:
                    with os.fdopen(source, "rb") as pcm:
                        _encode(pcm, _Told(out), asked["encode"], asked["rate_hz"])
                else:
                    signal.setitimer(signal.ITIMER_REAL, WALL_S)  # SIGALRM ends it
                    make = _leaf if "pictures" in asked else _MAKES[_kind(asked)]
                    make(os.fdopen(source, "rb"), out, asked)
                _say(out, ENDED, b"")
                status = 0
            except _DAMAGED:
                why = f"This is no {_kind(asked)} that can be read: it is damaged."
                _say(out, REFUSED, why.encode())
            except _UnusableError as error:
                _say(out, REFUSED, str(error).encode())
    finally:
        os._exit(status)


def _kind(asked: dict[str, Any]) -> str:
    if "most_pixels" not in asked:
        return "audio file"
    return "video" if "fps" in asked or "pictures" in asked else "picture"


def _decode(file: Any, out: Any, asked: dict[str, Any]) -> None:
    n_samples = 0
    with av.open(file, format=asked["container"]) as source:
        for block in _blocks(source, asked["rate_hz"]):
            n_samples += len(block) // 2
            if n_samples > asked["max_s"] * asked["rate_hz"]:
                raise _UnusableError(f"The audio is longer than {asked['max_s']:g} s.")
            _say(out, DECODED, block)


def _watch(file: Any, out: Any, asked: dict[str, Any]) -> None:
    """Tells videos.HEAD, and the pixels of each chosen frame."""
    n_frames, rate = _length(file, asked)
    wanted = chosen(n_frames, rate, asked["fps"])
    file.seek(0)
    sides, turns = (0, 0), 0
    with av.open(file, format=asked["container"]) as source:
        for n, frame in enumerate(source.decode(_video_of(source))):
            if n not in wanted:
                continue
            is_first = not any(sides)
            if is_first:
                _check_sides("video", frame.width, frame.height, asked)
                width, height = frame.width, frame.height
                share = share_of(width, height, len(wanted), asked["most_pixels"])
                sides = max(1, int(width * share)), max(1, int(height * share))
                turns = round(frame.rotation / 90)
            small = frame.reformat(*sides, format="rgb24", interpolation=Interpolation.AREA)
            pixels = np.rot90(small.to_ndarray(), turns)
            if is_first:
                _say(out, DECODED, HEAD.pack(pixels.shape[1], pixels.shape[0], n_frames / rate))
            _say(out, DECODED, pixels.tobytes())
            if n == wanted[-1]:
                break
    if not any(sides):
        raise _UnusableError("The video has no frames.")


def _length(file: Any, asked: dict[str, Any]) -> tuple[int, float]:
    """Frames of the video, and how many of them are a second."""
    with av.open(file, format=asked["container"]) as source:
        stream = _video_of(source)
        told = stream.duration and stream.duration * stream.time_base
        told_s = float(told or (source.duration or 0) / av.time_base)
        rate = float(stream.average_rate or 0)
        # Not each is worth its decoding.
        n_frames = 0 if told_s > asked["max_s"] else sum(bool(p.size) for p in source.demux(stream))
    if told_s > asked["max_s"] or n_frames > asked["max_s"] * rate > 0:
        raise _UnusableError(f"The video is longer than {asked['max_s']:g} s.")
    if not (n_frames and rate):
        raise _UnusableError("The video has no frames.")
    return n_frames, rate


def _video_of(source: Any) -> Any:
    """The first stream of pictures that is no cover of sound."""
    streams = [s for s in source.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise _UnusableError("The file has no video.")
    streams[0].codec_context.thread_count = 1
    return streams[0]


def _draw(file: Any, out: Any, asked: dict[str, Any]) -> None:
    """Tells width, height and a PNG file of what is seen, with at most as many pixels as asked."""
    seen = _read(file, asked)
    png = io.BytesIO()
    seen.save(png, "PNG", compress_level=1)
    _say(out, DECODED, b"".join(side.to_bytes(4, "little") for side in seen.size))
    _say(out, DECODED, png.getvalue())


def _leaf(file: Any, out: Any, asked: dict[str, Any]) -> None:
    """Tells videos.HEAD, and the pixels of each picture."""
    sides = None
    while head := file.read(PICTURE.size):
        n, size = PICTURE.unpack(head)
        try:
            seen = _read(io.BytesIO(file.read(size)), asked)
        except _UnusableError as error:
            raise _UnusableError(f"Picture {n}: {error}") from error
        if sides is None:
            sides = seen.size
            _say(out, DECODED, HEAD.pack(*sides, 0.0))
        elif seen.size != sides:
            raise _UnusableError(f"Picture {n} has another size than the first.")
        _say(out, DECODED, seen.tobytes())


def _read(file: Any, asked: dict[str, Any]) -> Image.Image:
    """What is seen of a picture, with at most as many pixels as asked."""
    try:
        return _seen(file, asked)
    except (MemoryError, _UnusableError):
        raise
    except Exception as error:  # of any kind, where a file is made to break the decoder
        why = str(error).rstrip(".")
        raise _UnusableError(f"The picture cannot be read: {why}.") from error


def _seen(file: Any, asked: dict[str, Any]) -> Image.Image:
    with Image.open(file, formats=("PNG", "JPEG")) as image:
        width, height = image.size
        _check_sides("picture", width, height, asked)
        seen: Image.Image = image
        if (share := asked["most_pixels"] / (width * height)) < 1:
            if image.mode not in ("L", "RGB", "RGBA", "CMYK"):
                seen = image.convert("RGB")  # others are scaled by the nearest pixel
            sides = (max(1, int(width * share**0.5)), max(1, int(height * share**0.5)))
            seen.thumbnail(sides, Image.Resampling.BICUBIC)
        upright: Image.Image = ImageOps.exif_transpose(seen).convert("RGB")
    upright.info.clear()  # nothing of the file but its pixels
    return upright


_MAKES = {"picture": _draw, "video": _watch, "audio file": _decode}


def _check_sides(what: str, width: int, height: int, asked: dict[str, Any]) -> None:
    if width * height > asked["max_pixels"]:
        raise _UnusableError(
            f"The {what} has {width} x {height} pixels, at most {asked['max_pixels']} in all."
        )
    if max(width, height) > asked["max_ratio"] * min(width, height):
        raise _UnusableError(
            f"The {what} has {width} x {height} pixels: one side is more than "
            f"{asked['max_ratio']} times as long as the other."
        )


def _encode(pcm: Any, file: Any, container: str, rate_hz: int) -> None:
    """pcm: read to its end, as it comes."""
    with av.open(file, _WRITE, format=container) as out:
        stream = out.add_stream("aac", rate=rate_hz, layout="mono", bit_rate=_AAC_BIT_RATE)
        resampler = av.AudioResampler("fltp", "mono", rate_hz, stream.frame_size)
        rest = b""
        while some := pcm.read1(1 << 16):
            rest += some
            whole = len(rest) // 2 * 2
            samples, rest = np.frombuffer(rest[:whole], np.int16), rest[whole:]
            frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.sample_rate = rate_hz
            for part in resampler.resample(frame):
                out.mux(stream.encode(part))
        for part in resampler.resample(None):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))


class _Told:
    """A file that is told piece by piece."""

    def __init__(self, out: Any):
        self._out = out

    def write(self, data: bytes) -> int:
        _say(self._out, DECODED, bytes(data))
        return len(data)


def _blocks(source: Any, rate_hz: int) -> Any:
    """int16 of the first audio stream, mono."""
    if not source.streams.audio:
        raise _UnusableError("The file has no sound.")
    [stream, *_] = source.streams.audio
    stream.codec_context.thread_count = 1
    resampler = av.AudioResampler(format="s16", layout="mono", rate=rate_hz)
    for frame in source.decode(stream):
        for part in resampler.resample(frame):
            yield part.to_ndarray().tobytes()
    for part in resampler.resample(None):
        yield part.to_ndarray().tobytes()


def _limit() -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    prctl(_DUMPABLE, 0, 0, 0, 0)
    with open("/proc/self/statm", encoding="ascii") as statm:
        now_bytes = int(statm.read().split()[5]) * resource.getpagesize()  # data and stack
    limits = {
        resource.RLIMIT_DATA: now_bytes + MEMORY_BYTES,
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for what, most in limits.items():
        resource.setrlimit(what, (most, most))


def _say(out: Any, kind: bytes, payload: bytes) -> None:
    message = memoryview(kind + len(payload).to_bytes(4, "little") + payload)
    while message:
        message = message[out.write(message) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
