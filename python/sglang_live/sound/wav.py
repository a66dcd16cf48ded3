"""Reader of the RIFF family: RIFF, RIFX, RF64, BW64.

In: bytes of a file. Out: a WavFile: coding, and the bytes of its samples.
Lengths are hints: a recorder that was killed or that streams leaves 0, 0xFFFFFFFF or an old length.
Sources: Multimedia Programming Interface 1.0 (1991); Multiple Channel Audio Data and WAVE Files
(Microsoft, 2007); EBU Tech 3306 (RF64).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError
from sglang_live.sound import g711

_FAMILY = {b"RIFF": "<", b"RIFX": ">", b"RF64": "<", b"BW64": "<"}
_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 0x0001, 0x0003, 0x0006, 0x0007, 0xFFFE
# A subformat of WAVE_FORMAT_EXTENSIBLE is a format tag and one of these; the second is B-format.
_GUID_TAILS = (
    bytes.fromhex("000000001000800000aa00389b71"),
    bytes.fromhex("00002107d3118644c8c1ca000000"),
)
_KNOWN = (b"data", b"fmt ", b"fact", b"LIST", b"PEAK", b"bext", b"ds64", b"id3 ", b"JUNK")
_MAX_HEADER_CHUNKS = 4096


@dataclass(frozen=True, slots=True)
class WavFile:
    """The contents of a wav file.

    order: byte order, "<" or ">".
    tag: WAVE format tag; that of the subformat for WAVE_FORMAT_EXTENSIBLE.
    sample_bytes: stored size of one sample; 0 for a coding in blocks.
    fmt: the format chunk, unchanged.
    samples: bytes of the data chunk, to its end or that of the file.
    """

    order: str
    tag: int
    n_channels: int
    rate_hz: int
    sample_bytes: int
    fmt: bytes
    samples: memoryview

    @property
    def is_plain(self) -> bool:
        """Whether samples are stored one by one, so that they are decoded here."""
        width = self.sample_bytes
        return (
            (self.tag == _PCM and width in (1, 2, 3, 4, 8))
            or (self.tag == _FLOAT and width in (4, 8))
            or (self.tag in (_ALAW, _MULAW) and width == 1)
        )

    def blocks(self, n_frames: int) -> Iterator[npt.NDArray[np.float32]]:
        """Iterate over [n, n_channels] float32 in [-1, 1], with up to n_frames frames each.

        Part of a frame at the end is ignored.
        """
        frame_bytes = self.sample_bytes * self.n_channels
        whole = len(self.samples) // frame_bytes * frame_bytes
        step = n_frames * frame_bytes
        for start in range(0, whole, step):
            block = self.samples[start : min(start + step, whole)]
            yield self._floats(block).reshape(-1, self.n_channels)

    def repaired(self) -> bytes:
        """Returns the same file with true lengths, for libsndfile, which relies on them."""
        body = b"WAVE" + _chunk(self.order, b"fmt ", self.fmt)
        body += _chunk(self.order, b"data", bytes(self.samples))
        name = b"RIFX" if self.order == ">" else b"RIFF"
        return _chunk(self.order, name, body)

    def _floats(self, raw: memoryview) -> npt.NDArray[np.float32]:
        order, width = self.order, self.sample_bytes
        if self.tag == _ALAW:
            return g711.alaw_decode(np.frombuffer(raw, np.uint8)).astype(np.float32) / np.float32(
                32768
            )
        if self.tag == _MULAW:
            return g711.mulaw_decode(np.frombuffer(raw, np.uint8)).astype(np.float32) / np.float32(
                32768
            )
        if self.tag == _FLOAT:
            # A value beyond the range of float32 becomes infinite, which the decoder refuses.
            with np.errstate(over="ignore"):
                return np.frombuffer(raw, f"{order}f{width}").astype(np.float32)
        if width == 1:  # RIFF has no signed bytes
            return (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / np.float32(128)
        if width == 3:
            return _from_24_bit(raw, order)
        # Samples with fewer valid bits than their container use its upper bits.
        scale = 2.0 ** (8 * width - 1)
        return (np.frombuffer(raw, f"{order}i{width}") / scale).astype(np.float32)


def read_wav(data: bytes) -> WavFile | None:
    """Returns None if the bytes are of another family.

    Raises:
        BadInputError: the file has no format or data, or no channels or rate.
    """
    order = _FAMILY.get(data[:4])
    if order is None or data[8:12] != b"WAVE":
        return None
    chunks = _chunks(data, order)
    if b"data" not in chunks:
        raise BadInputError("The wav file has no 'data' chunk.")
    if b"fmt " not in chunks or len(chunks[b"fmt "]) < 14:
        raise BadInputError("The wav file has no 'fmt ' chunk before its data.")
    fmt = bytes(chunks[b"fmt "])
    tag, n_channels, rate_hz, _, block_bytes = struct.unpack_from(f"{order}HHIIH", fmt)
    bits = struct.unpack_from(f"{order}H", fmt, 14)[0] if len(fmt) >= 16 else 0
    if tag == _EXTENSIBLE and len(fmt) >= 40 and fmt[26:40] in _GUID_TAILS:
        (tag,) = struct.unpack_from(f"{order}H", fmt, 24)
    if not n_channels or not rate_hz:
        raise BadInputError(f"The wav file has {n_channels} channels at {rate_hz} Hz.")
    width = _sample_bytes(tag, bits, block_bytes, n_channels)
    return WavFile(order, tag, n_channels, rate_hz, width, fmt, chunks[b"data"])


def _chunks(data: bytes, order: str) -> dict[bytes, memoryview]:
    """The first chunk of each name, up to the data."""
    found: dict[bytes, memoryview] = {}
    view, at, long_data_bytes = memoryview(data), 12, None
    for _ in range(_MAX_HEADER_CHUNKS):
        if at + 8 > len(data):
            break
        name, size = struct.unpack_from(f"{order}4sI", data, at)
        body = at + 8
        if name == b"data":
            if size == 0xFFFFFFFF and long_data_bytes:
                size = long_data_bytes
            found[name] = view[body : _data_end(data, order, body, size)]
            break
        found.setdefault(name, view[body : body + size])
        if name == b"ds64" and body + 16 <= len(data):
            (long_data_bytes,) = struct.unpack_from("<Q", data, body + 8)
        at = _after(data, body + size, size)
    return found


def _after(data: bytes, end: int, size: int) -> int:
    """Position of the next chunk. Not every writer pads chunks to even lengths."""
    if size % 2 and _is_name(data[end : end + 4]) and data[end + 1 : end + 5] not in _KNOWN:
        return end
    return end + size % 2


def _data_end(data: bytes, order: str, start: int, size: int) -> int:
    end = start + size
    if size and end <= len(data):
        return end
    # The length is 0 or beyond the end. A file that is really empty continues with other chunks.
    if not size and start < len(data) and _ends_in_chunks(data, order, start):
        return start
    return len(data)


def _ends_in_chunks(data: bytes, order: str, at: int) -> bool:
    for _ in range(_MAX_HEADER_CHUNKS):
        if at >= len(data):
            return True
        if len(data) - at < 8 or not _is_name(data[at : at + 4]):
            return False
        (size,) = struct.unpack_from(f"{order}I", data, at + 4)
        if at + 8 + size > len(data):
            return False
        at = _after(data, at + 8 + size, size)
    return False


def _is_name(name: bytes) -> bool:
    return len(name) == 4 and all(0x20 <= byte < 0x7F for byte in name)


def _sample_bytes(tag: int, bits: int, block_bytes: int, n_channels: int) -> int:
    if tag not in (_PCM, _FLOAT, _ALAW, _MULAW):
        return 0
    least = -(-bits // 8)
    # 24 bits may be stored in 32; a block length that fits no container is wrong.
    if block_bytes and block_bytes % n_channels == 0:
        stored = block_bytes // n_channels
        if stored == least or (stored > least and stored in (1, 2, 3, 4, 8)):
            return stored
    return least


def _from_24_bit(raw: memoryview, order: str) -> npt.NDArray[np.float32]:
    octets = np.frombuffer(raw, np.uint8).reshape(-1, 3)
    wide = np.zeros((len(octets), 4), np.uint8)
    if order == "<":
        wide[:, 1:] = octets
    else:
        wide[:, :3] = octets
    return (wide.view(f"{order}i4")[:, 0] / 2.0**31).astype(np.float32)


def _chunk(order: str, name: bytes, body: bytes) -> bytes:
    return struct.pack(f"{order}4sI", name, len(body)) + body + b"\0" * (len(body) % 2)
