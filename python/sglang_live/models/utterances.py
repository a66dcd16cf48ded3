"""What recognisers share: cuts of long audio into what is heard at once, and loops in tokens."""

from itertools import takewhile

import numpy as np
import numpy.typing as npt

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.models.speech import Pcm

# Moonshine and Whisper were trained on up to 30 s.
MAX_PIECE_S = 30.0
# A cut lies in the second half of what one piece can hold.
_EARLIEST = 0.5
_FRAME = INPUT_RATE_HZ // 50
# Ten frames, 0.2 s: a pause between phrases, and not the closure of a plosive.
_PAUSE_FRAMES = 10
# A tail that repeats itself is cut: its least number of tokens, and of rounds.
_LOOP_TOKENS, _LOOP_TIMES, _MAX_PERIOD = 12, 3, 16


def utterance_cuts(pcm: Pcm, max_piece_s: float = MAX_PIECE_S) -> list[int]:
    """Cut audio in the middle of its quietest 0.2 s, so that no piece exceeds `max_piece_s`.

    Args:
        pcm: [n] int16, mono, at INPUT_RATE_HZ.
        max_piece_s: at least 2 s.
    Returns:
        Ascending sample numbers, each the beginning of another piece; empty for short audio.
    """
    n_most = int(max_piece_s * INPUT_RATE_HZ)
    begin = 0
    cuts = []
    while len(pcm) - begin > n_most:
        earliest = begin + int(n_most * _EARLIEST)
        begin = earliest + _quietest(pcm[earliest : begin + n_most])
        cuts.append(begin)
    return cuts


def utterances(pcm: Pcm) -> list[Pcm]:
    """The audio divided by `utterance_cuts`; together they are all of it."""
    return np.split(pcm, utterance_cuts(pcm))


def _quietest(pcm: Pcm) -> int:
    """Sample number of the middle of the quietest pause."""
    n_frames = len(pcm) // _FRAME
    frames = pcm[: n_frames * _FRAME].reshape(n_frames, _FRAME).astype(np.float64)
    energies = np.square(frames).mean(axis=1)
    windows: npt.NDArray[np.float64] = np.convolve(energies, np.ones(_PAUSE_FRAMES), "valid")
    return (int(windows.argmin()) + _PAUSE_FRAMES // 2) * _FRAME


def unlooped(ids: list[int]) -> list[int]:
    """The tokens without a tail that only repeats what stands before it."""
    for period in range(1, _MAX_PERIOD + 1):
        pairs = zip(reversed(ids), reversed(ids[:-period]), strict=False)
        n_repeated = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if n_repeated + period >= max(_LOOP_TOKENS, _LOOP_TIMES * period):
            return ids[: len(ids) - n_repeated]
    return ids
