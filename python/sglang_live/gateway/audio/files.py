"""Audio as files that can be sent while they grow.

In: int16 at OUTPUT_RATE_HZ. Out: bytes of a file in some format. libsndfile writes all that is
more than bytes behind a header.
"""

import struct
from typing import Protocol

import numpy as np
import soundfile as sf

from sglang_live.core import OUTPUT_RATE_HZ

_UNKNOWN_LENGTH = 0xFFFFFFFF


class Encoder(Protocol):
    def push(self, pcm: bytes) -> bytes: ...

    def finish(self) -> bytes: ...


class _Raw:
    """header: before the first samples."""

    def __init__(self, header: bytes = b""):
        self._header = header

    def push(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return self.push(b"")


class _Sink:
    """A file of which what was written is given away. What is written again is lost: those who
    write a length into their header when they know it have sent that header by then."""

    def __init__(self) -> None:
        self._new, self._given, self._at = bytearray(), 0, 0

    def write(self, data) -> int:
        data = bytes(data)
        fresh = data[max(0, self._given - self._at) :]
        begin = max(self._at, self._given) - self._given
        self._new[begin : begin + len(fresh)] = fresh
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        end = self._given + len(self._new)
        self._at = offset + (0, self._at, end)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def take(self) -> bytes:
        new = bytes(self._new)
        self._given += len(new)
        self._new.clear()
        return new


class _Coded:
    def __init__(self, container: str, subtype: str, **how):
        self._sink = _Sink()
        self._file = sf.SoundFile(
            self._sink,
            "w",
            samplerate=OUTPUT_RATE_HZ,
            channels=1,
            format=container,
            subtype=subtype,
            **how,
        )

    def push(self, pcm: bytes) -> bytes:
        self._file.write(np.frombuffer(pcm, "<i2"))
        return self._sink.take()

    def finish(self) -> bytes:
        self._file.close()
        return self._sink.take()


class _Whole(_Coded):
    """Sent when it is complete: readers rely on the length in its header."""

    def push(self, pcm: bytes) -> bytes:
        self._file.write(np.frombuffer(pcm, "<i2"))
        return b""


def _wav_header() -> bytes:
    """Of a file whose length is not known: readers go on to the end."""
    rate, width = OUTPUT_RATE_HZ, 2
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * width, width, 8 * width)
    data = struct.pack("<4sI", b"data", _UNKNOWN_LENGTH)
    return struct.pack("<4sI4s", b"RIFF", _UNKNOWN_LENGTH, b"WAVE") + form + data


# By the name of response_format: media type, and what makes the file.
FORMATS = {
    # 80 kbit/s all along: readers work out from the first frame how long it is.
    "mp3": (
        "audio/mpeg",
        lambda: _Coded("MP3", "MPEG_LAYER_III", bitrate_mode="CONSTANT", compression_level=0.5),
    ),
    "opus": ("audio/ogg", lambda: _Coded("OGG", "OPUS")),
    "flac": ("audio/flac", lambda: _Whole("FLAC", "PCM_16")),
    "wav": ("audio/wav", lambda: _Raw(_wav_header())),
    "pcm": ("audio/pcm", lambda: _Raw()),
}
