"""Encoders of audio files, that are sent while they grow or when they are complete.

In: int16 at OUTPUT_RATE_HZ. Out: bytes of a file. A file that is sent while it grows does not say
how long it is: its reader reads to its end. One that is complete has its true length. libsndfile
encodes all of them except growing WAV, raw PCM and AAC.
"""

import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import soundfile as sf

from sglang_live.core import INPUT_RATE_HZ, OUTPUT_RATE_HZ, AudioPart
from sglang_live.gateway.audio.resampler import to_int16
from sglang_live.gateway.errors import ClientEventError
from sglang_live.sound import media
from sglang_live.sound.decoder import Limits, decode_samples

_UNKNOWN_LENGTH = 0xFFFFFFFF
AAC = "aac"


class Encoder(Protocol):
    def push(self, pcm: bytes) -> bytes: ...

    def finish(self) -> bytes: ...

    def close(self) -> None:
        """Whether it is finished or not."""


class _Raw:
    """Raw PCM after a header."""

    def __init__(self, header: bytes = b""):
        self._header = header

    def push(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return self.push(b"")

    def close(self) -> None:
        """Nothing is open."""


class _Sink:
    """A file whose bytes can be taken out while it is written.

    A later write to bytes that were taken is lost: an encoder that writes the length into its
    header at the end cannot change a header that has been sent.
    """

    def __init__(self) -> None:
        self._new = bytearray()
        self._taken = 0
        self._at = 0

    def write(self, data: bytes) -> int:
        data = bytes(data)
        fresh = data[max(0, self._taken - self._at) :]
        begin = max(self._at, self._taken) - self._taken
        self._new[begin : begin + len(fresh)] = fresh
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        end = self._taken + len(self._new)
        self._at = offset + (0, self._at, end)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def take(self) -> bytes:
        new = bytes(self._new)
        self._taken += len(new)
        self._new.clear()
        return new


class _Coded:
    """
    Args:
        options: of soundfile.SoundFile.
        grows: whether bytes are returned before the file is complete, and its header stays as it
            was before the first of them.
    """

    def __init__(self, container: str, subtype: str, *, grows: bool, **options: Any):
        self._sink = _Sink()
        self._grows = grows
        self._file = sf.SoundFile(
            self._sink,
            "w",
            samplerate=OUTPUT_RATE_HZ,
            channels=1,
            format=container,
            subtype=subtype,
            **options,
        )

    def push(self, pcm: bytes) -> bytes:
        self._file.write(np.frombuffer(pcm, "<i2"))
        return self._sink.take() if self._grows else b""

    def finish(self) -> bytes:
        self._file.close()
        return self._sink.take()

    def close(self) -> None:
        self._file.close()


def _wav_header() -> bytes:
    """Header of a file of unknown length, which readers read to its end."""
    rate, width = OUTPUT_RATE_HZ, 2
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * width, width, 8 * width)
    data = struct.pack("<4sI", b"data", _UNKNOWN_LENGTH)
    return struct.pack("<4sI4s", b"RIFF", _UNKNOWN_LENGTH, b"WAVE") + form + data


@dataclass(frozen=True, slots=True)
class FileFormat:
    """
    grows: whether readers understand a file without what is written into its header at the end.
    growing, whole: an encoder of files that are sent while they grow, or when they are complete.
    blocks: it waits for another process.
    """

    media_type: str
    grows: bool
    growing: Callable[[], Encoder]
    whole: Callable[[], Encoder]
    blocks: bool = False

    def file(self, pcm: bytes) -> bytes:
        """Blocks."""
        with closing(self.whole()) as encoder:
            return encoder.push(pcm) + encoder.finish()


def _coded(media_type: str, *form: str, grows: bool = True, **options: Any) -> FileFormat:
    growing, whole = (partial(_Coded, *form, grows=g, **options) for g in (grows, False))
    return FileFormat(media_type, grows, growing, whole)


# By the name of response_format.
FORMATS: dict[str, FileFormat] = {
    # Constant 80 kbit/s: readers compute the duration of a growing file from its first frame.
    "mp3": _coded(
        "audio/mpeg", "MP3", "MPEG_LAYER_III", bitrate_mode="CONSTANT", compression_level=0.5
    ),
    "opus": _coded("audio/ogg", "OGG", "OPUS"),
    "flac": _coded("audio/flac", "FLAC", "PCM_16", grows=False),
    "wav": FileFormat(
        "audio/wav",
        True,
        lambda: _Raw(_wav_header()),
        partial(_Coded, "WAV", "PCM_16", grows=False),
    ),
    "pcm": FileFormat("audio/pcm", True, _Raw, _Raw),
    AAC: FileFormat(
        "audio/aac",
        True,
        partial(media.AacEncoder, OUTPUT_RATE_HZ),
        partial(media.AacEncoder, OUTPUT_RATE_HZ),
        blocks=True,
    ),
}


def check_format(name: str, param: str) -> None:
    """Raises ClientEventError if this server cannot write it."""
    if name == AAC and not media.is_installed():
        raise ClientEventError(
            f"{AAC} is not written by this server: it lacks the extra sglang-live[media].",
            param=param,
        )


# --- reader of the audio files that clients send ---


def read_audio(data: bytes, *, max_s: float) -> AudioPart:
    """Read a whole file of any usual sample rate and mix its channels. Blocks.

    Raises:
        BadInputError: see sound.decoder.decode_samples, and sound.media.decode.
    """
    if (container := media.container_of(data)) is not None:
        return AudioPart(media.decode(data, container, rate_hz=INPUT_RATE_HZ, max_s=max_s))
    heard = decode_samples(data, rate_hz=INPUT_RATE_HZ, limits=Limits(max_s=max_s))
    return AudioPart(to_int16(heard * np.float32(32768)))
