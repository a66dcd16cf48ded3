"""G.711: 16-bit linear audio to and from 8-bit mu-law and A-law.

Source: ITU-T Recommendation G.711 (11/88), tables 1a to 2b. Both laws are floating-point numbers in
eight bits: sign, three bits of exponent (segment), four of mantissa. Decoding reads a table of 256
entries, encoding one of 65,536, both built once from the definition.
"""

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]
Pcm = npt.NDArray[np.int16]

_MULAW_BIAS = 0x84
_MULAW_CLIP = 32635
_ALAW_INVERT = 0x55  # A-law inverts the even bits so that silence is not a run of zeros


def mulaw_decode(codes: Codes) -> Pcm:
    """codes: [n] uint8. Returns [n] int16."""
    return _MULAW_TO_LINEAR[codes]


def mulaw_encode(pcm: Pcm) -> Codes:
    """pcm: [n] int16. Returns [n] uint8."""
    return _LINEAR_TO_MULAW[pcm.view(np.uint16)]


def alaw_decode(codes: Codes) -> Pcm:
    """codes: [n] uint8. Returns [n] int16."""
    return _ALAW_TO_LINEAR[codes]


def alaw_encode(pcm: Pcm) -> Codes:
    """pcm: [n] int16. Returns [n] uint8."""
    return _LINEAR_TO_ALAW[pcm.view(np.uint16)]


def _mulaw_decode_table() -> Pcm:
    code = ~np.arange(256) & 0xFF
    segment, mantissa = (code >> 4) & 0x07, code & 0x0F
    magnitude = (((mantissa << 3) + _MULAW_BIAS) << segment) - _MULAW_BIAS
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.int16)


def _mulaw_encode_table() -> Codes:
    linear = _all_int16()
    biased = np.minimum(np.abs(linear), _MULAW_CLIP) + _MULAW_BIAS
    segment = _highest_bit(biased) - 7
    mantissa = (biased >> (segment + 3)) & 0x0F
    sign = np.where(linear < 0, 0x80, 0)
    codes: Codes = (~(sign | (segment << 4) | mantissa) & 0xFF).astype(np.uint8)
    return codes


def _alaw_decode_table() -> Pcm:
    code = np.arange(256) ^ _ALAW_INVERT
    segment, mantissa = (code >> 4) & 0x07, code & 0x0F
    base = (mantissa << 4) + 8
    magnitude = np.where(segment == 0, base, (base + 0x100) << np.maximum(segment - 1, 0))
    return np.where(code & 0x80, magnitude, -magnitude).astype(np.int16)


def _alaw_encode_table() -> Codes:
    linear = _all_int16()
    # Negative values are mirrored by complement, so that -1 has the smallest code.
    magnitude = np.where(linear < 0, ~linear, linear)
    segment = np.maximum(_highest_bit(np.maximum(magnitude, 1)) - 7, 0)
    mantissa = (magnitude >> np.maximum(segment + 3, 4)) & 0x0F
    sign = np.where(linear < 0, 0, 0x80)
    codes: Codes = ((sign | (segment << 4) | mantissa) ^ _ALAW_INVERT).astype(np.uint8)
    return codes


def _all_int16() -> npt.NDArray[np.int32]:
    """[65536] every int16 value, in the order of its unsigned bit pattern."""
    return np.arange(65536, dtype=np.uint16).view(np.int16).astype(np.int32)


def _highest_bit(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Index of the highest set bit; values: positive integers."""
    return np.floor(np.log2(values)).astype(np.int32)


_MULAW_TO_LINEAR = _mulaw_decode_table()
_LINEAR_TO_MULAW = _mulaw_encode_table()
_ALAW_TO_LINEAR = _alaw_decode_table()
_LINEAR_TO_ALAW = _alaw_encode_table()
