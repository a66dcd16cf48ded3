"""Repairs lengths of sound data in headers that were never completed: aiff, au, caf, w64.

A recorder that was killed, or that writes to a pipe, leaves 0 or all ones as the length. libsndfile
takes some of these lengths literally; with the true length it reads the whole file.
"""

import struct

_W64_RIFF = bytes.fromhex("726966662e91cf11a5d628db04c10000")
_W64_DATA = bytes.fromhex("64617461f3acd3118cd100c04f8edb8a")
_MAX_CHUNKS = 4096


def with_true_length(data: bytes) -> bytes:
    """Returns the file, with a length of its sound that is 0 or beyond the end repaired."""
    match data[:4]:
        case b"FORM" if data[8:12] in (b"AIFF", b"AIFC"):
            return _aiff(data)
        case b".snd" | b"dns.":
            return _au(data)
        case b"caff":
            return _caf(data)
        case b"riff" if data[:16] == _W64_RIFF:
            return _w64(data)
    return data


def _aiff(data: bytes) -> bytes:
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            return data
        name, size = struct.unpack_from(">4sI", data, at)
        left = len(data) - at - 8
        if name == b"SSND":
            if 8 < size <= left:
                return data
            # The number of frames is in another chunk, and may be as wrong.
            repaired = bytearray(data)
            struct.pack_into(">I", repaired, at + 4, left)
            struct.pack_into(">I", repaired, 4, len(data) - 8)
            _repair_frames(repaired, left - 8)
            return bytes(repaired)
        at += 8 + size + size % 2
    return data


def _repair_frames(data: bytearray, n_bytes: int) -> None:
    at = data.find(b"COMM", 12)
    if at < 0 or at + 16 > len(data):
        return
    n_channels, _, bits = struct.unpack_from(">HIH", data, at + 8)
    frame_bytes = n_channels * -(-bits // 8)
    if frame_bytes:
        struct.pack_into(">I", data, at + 10, max(0, n_bytes) // frame_bytes)


def _au(data: bytes) -> bytes:
    order = ">" if data[:4] == b".snd" else "<"
    if len(data) < 24:
        return data
    start, size = struct.unpack_from(f"{order}II", data, 4)
    return _packed(data, f"{order}I", 8, size, len(data) - start)


def _caf(data: bytes) -> bytes:
    at = 8
    for _ in range(_MAX_CHUNKS):
        if at + 12 > len(data):
            return data
        name, size = struct.unpack_from(">4sq", data, at)
        if name == b"data":
            return _packed(data, ">q", at + 4, size if size > 4 else 0, len(data) - at - 12)
        if size < 0:
            return data
        at += 12 + size
    return data


def _w64(data: bytes) -> bytes:
    at = 40
    for _ in range(_MAX_CHUNKS):
        if at + 24 > len(data):
            return data
        (size,) = struct.unpack_from("<Q", data, at + 16)
        if data[at : at + 16] == _W64_DATA:
            # Sizes of w64 include their own header.
            return _packed(data, "<Q", at + 16, size if size > 24 else 0, len(data) - at)
        if size < 24:
            return data
        at += (size + 7) & ~7
    return data


def _packed(data: bytes, form: str, at: int, size: int, left: int) -> bytes:
    if left <= 0 or 0 < size <= left:
        return data
    repaired = bytearray(data)
    struct.pack_into(form, repaired, at, left)
    return bytes(repaired)
