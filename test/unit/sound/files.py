"""Sound files built with the lengths and formats that a test gives."""

import io
import struct

import numpy as np
import soundfile as sf

RATE_HZ = 16_000


def chunk(name: bytes, body: bytes, *, size: int | None = None, order: str = "<") -> bytes:
    size = len(body) if size is None else size
    return struct.pack(f"{order}4sI", name, size) + body + b"\0" * (len(body) % 2)


def fmt(tag: int, bits: int, *, n_channels: int = 1, rate_hz: int = RATE_HZ, **more) -> bytes:
    """A format chunk's body.

    more: `stored`, bits of the container; `extra`, bytes after the first 16; `order` of bytes.
    """
    order, stored = more.get("order", "<"), more.get("stored", bits)
    block = min(n_channels * -(-stored // 8), 0xFFFF)
    head = struct.pack(f"{order}HHIIHH", tag, n_channels, rate_hz, rate_hz * block, block, bits)
    return head + more.get("extra", b"")


def extensible(tag: int, stored: int, valid: int, n_channels: int = 1, tail: str = "") -> bytes:
    guid = struct.pack("<H", tag) + bytes.fromhex(tail or "000000001000800000aa00389b71")
    extra = struct.pack("<HHI", 22, valid, 0) + guid
    return fmt(0xFFFE, stored, n_channels=n_channels, extra=extra)


def wav(form: bytes, data: bytes, **how) -> bytes:
    """A wav file.

    how: `name`, `riff_size`, `data_size`, `order`; chunks `before` and `after` the data chunk.
    """
    order = how.get("order", "<")
    body = b"WAVE" + chunk(b"fmt ", form, order=order) + how.get("before", b"")
    body += chunk(b"data", data, size=how.get("data_size"), order=order) + how.get("after", b"")
    size = how.get("riff_size", len(body))
    return struct.pack(f"{order}4sI", how.get("name", b"RIFF"), size) + body


def written(samples: np.ndarray, container: str, subtype: str, rate_hz: int = RATE_HZ) -> bytes:
    file = io.BytesIO()
    sf.write(file, samples, rate_hz, format=container, subtype=subtype)
    return file.getvalue()


def tone(seconds: float = 0.25, rate_hz: int = RATE_HZ) -> np.ndarray:
    """[n] int16."""
    t = np.arange(round(seconds * rate_hz)) / rate_hz
    return (8000 * np.sin(2 * np.pi * 440 * t)).astype(np.int16)
