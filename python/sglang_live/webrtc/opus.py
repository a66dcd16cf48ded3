"""libopus through ctypes: the library in PyAV's wheel, whose own interface has no FEC.

In and out: int16 mono. Source: RFC 6716, opus_defines.h.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sglang_live.errors import LiveError

_VOIP = 2048
_SET_BITRATE, _SET_COMPLEXITY, _SET_FEC, _SET_LOSS = 4002, 4010, 4012, 4014
_BIT_RATE = 32_000
# 12.5 ms of a core for a second of speech; 0 takes 5 ms and is heard.
_COMPLEXITY = 5
_MOST_PACKET_BYTES = 1275
# Of the longest packet.
_MOST_S = 0.12


class OpusError(LiveError):
    """A packet that is none of Opus."""


@cache
def _library() -> ctypes.CDLL:
    found = find_spec("av")
    if found is None or found.origin is None:
        raise LiveError("PyAV is not installed")
    folder = Path(found.origin).parents[1] / "av.libs"
    files = sorted(folder.glob("libopus-*.so*"))
    if not files:
        raise LiveError(f"{folder} has no libopus: this is another wheel of PyAV")
    library = ctypes.CDLL(str(files[0]))
    number, state = ctypes.c_int32, ctypes.c_void_p
    for name in ("opus_decoder_create", "opus_encoder_create"):
        getattr(library, name).restype = state
    library.opus_decode.argtypes = [state, ctypes.c_char_p, number, ctypes.c_char_p, number, number]
    library.opus_encode.argtypes = [state, ctypes.c_char_p, number, ctypes.c_char_p, number]
    library.opus_packet_get_nb_samples.argtypes = [ctypes.c_char_p, number, number]
    for name in ("opus_decoder_destroy", "opus_encoder_destroy"):
        getattr(library, name).argtypes = [state]
    return library


def samples_in(packet: bytes, rate_hz: int) -> int:
    """Length of a packet's sound. Raises OpusError."""
    n: int = _library().opus_packet_get_nb_samples(packet, len(packet), rate_hz)
    if n <= 0:
        raise OpusError("no packet of Opus")
    return n


class Decoder:
    def __init__(self, rate_hz: int):
        self._library = _library()
        error = ctypes.c_int()
        self._state = ctypes.c_void_p(
            self._library.opus_decoder_create(rate_hz, 1, ctypes.byref(error))
        )
        if error.value:
            raise LiveError(f"libopus has no decoder at {rate_hz} Hz")
        self._most = round(_MOST_S * rate_hz)
        self._buffer = ctypes.create_string_buffer(2 * self._most)

    def decode(self, packet: bytes) -> bytes:
        """Raises OpusError."""
        return self._decode(packet, self._most, fec=False)

    def recover(self, following: bytes, n_samples: int) -> bytes:
        """The sound before `following`, which repeats it in short, if it does. Raises OpusError."""
        return self._decode(following, n_samples, fec=True)

    def conceal(self, n_samples: int) -> bytes:
        """Sound in the place of a lost packet, which fades into silence."""
        return self._decode(None, n_samples, fec=False)

    def _decode(self, packet: bytes | None, n_samples: int, *, fec: bool) -> bytes:
        length = len(packet) if packet else 0
        n = self._library.opus_decode(
            self._state, packet, length, self._buffer, n_samples, int(fec)
        )
        if n < 0:
            raise OpusError("a packet of Opus that cannot be decoded")
        return self._buffer.raw[: 2 * n]

    def close(self) -> None:
        self._library.opus_decoder_destroy(self._state)


class Encoder:
    def __init__(self, rate_hz: int):
        self._library = _library()
        error = ctypes.c_int()
        self._state = ctypes.c_void_p(
            self._library.opus_encoder_create(rate_hz, 1, _VOIP, ctypes.byref(error))
        )
        if error.value:
            raise LiveError(f"libopus has no encoder at {rate_hz} Hz")
        self._buffer = ctypes.create_string_buffer(_MOST_PACKET_BYTES)
        for what, value in ((_SET_BITRATE, _BIT_RATE), (_SET_COMPLEXITY, _COMPLEXITY)):
            self._set(what, value)
        self._set(_SET_FEC, 1)

    def expect_loss(self, share: float) -> None:
        """share: of the packets that the peer loses; how much is repeated depends on it."""
        self._set(_SET_LOSS, min(100, round(100 * share)))

    def encode(self, pcm: bytes) -> bytes:
        """pcm: 2.5 to 60 ms."""
        n = self._library.opus_encode(
            self._state, pcm, len(pcm) // 2, self._buffer, _MOST_PACKET_BYTES
        )
        if n < 0:
            raise LiveError("libopus has refused a frame")
        return self._buffer.raw[:n]

    def close(self) -> None:
        self._library.opus_encoder_destroy(self._state)

    def _set(self, what: int, value: int) -> None:
        # A variadic function: its arguments have no types of their own.
        self._library.opus_encoder_ctl(self._state, ctypes.c_int(what), ctypes.c_int32(value))
