"""Where MPEG audio begins in a file that has something else before it, such as a radio's headers.

Source: ISO 11172-3, section 2.4.2.3, and 13818-3 for lower sample rates.
"""

_SEARCHED_BYTES = 1 << 16
_KBIT_PER_S = {  # layer III by version 1, and 2 or 2.5
    3: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATE_HZ = (44_100, 48_000, 32_000)
# A frame's header is followed by those of the next ones: chance has three in a row rarely.
_FRAMES = 3


def begin_of(data: bytes) -> int | None:
    """Index of the first of several frames of MPEG layer III; None: there are none near the
    beginning."""
    at = data.find(b"\xff", 0, _SEARCHED_BYTES)
    while at >= 0:
        end, n_frames = at, 0
        while n_frames < _FRAMES and (size := _frame_bytes(data, end)):
            end, n_frames = end + size, n_frames + 1
        if n_frames == _FRAMES:
            return at
        at = data.find(b"\xff", at + 1, _SEARCHED_BYTES)
    return None


def _frame_bytes(data: bytes, at: int) -> int:
    """Size of the frame whose header is there; 0: none is."""
    if at + 4 > len(data):
        return 0
    version, layer = data[at + 1] >> 3 & 3, data[at + 1] >> 1 & 3
    bit_rate, rate, padding = data[at + 2] >> 4, data[at + 2] >> 2 & 3, data[at + 2] >> 1 & 1
    has_sync = data[at] == 0xFF and data[at + 1] >> 5 == 7
    if not has_sync or version == 1 or layer != 1 or bit_rate in (0, 15) or rate == 3:
        return 0
    kbit_per_s = _KBIT_PER_S[3 if version == 3 else 2][bit_rate - 1]
    rate_hz = _RATE_HZ[rate] >> {3: 0, 2: 1, 0: 2}[version]
    return (144 if version == 3 else 72) * 1000 * kbit_per_s // rate_hz + padding
