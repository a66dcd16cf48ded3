"""When each phoneme of a piece ends in its sound: from durations, or by its share of the sound."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_live.models.phonemes import CLAUSE_ENDS, Phoneme

# Quieter than a hundredth of the loudest sample is silence, before the first phoneme and after the
# last.
_SILENT = 100
# Shares of the sound: stress and length marks belong to the vowel beside them. With longer pauses
# than the networks make, words are in place: 0.09 s from hibari's durations in the median.
_MARKS = frozenset("ˈˌː")
_PAUSE = 4.0

Numbers = npt.NDArray[np.floating] | npt.NDArray[np.integer]


def ends_from_durations(
    durations: npt.NDArray[np.float32], n_samples: int
) -> npt.NDArray[np.int64]:
    """
    Args:
        durations: of each id, in any unit.
    Returns:
        [n_ids] int64, the sample after each id's last.
    """
    sums = np.cumsum(durations.reshape(-1).astype(np.float64))
    ends: npt.NDArray[np.int64] = np.rint(sums * (n_samples / max(sums[-1], 1e-9))).astype(np.int64)
    return ends


def estimated_ends(
    piece: Sequence[Phoneme], wave: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """For a network that tells no durations: every phoneme takes the same part of the sound.

    Returns:
        [n_phonemes] int64, the sample after each phoneme's last.
    """
    level = np.abs(wave)
    loud = np.flatnonzero(level * _SILENT > level.max(initial=0.0))
    first, last = (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, len(wave))
    shares = np.array([_share(phoneme.sign) for phoneme in piece])
    # The mark after the last word is the silence that is left out.
    while len(piece) and piece[-1].is_silent:
        shares[len(piece) - 1] = 0.0
        piece = piece[:-1]
    return first + ends_from_durations(shares, last - first)


def _share(sign: str) -> float:
    if sign in CLAUSE_ENDS:
        return _PAUSE
    return 0.0 if sign in _MARKS or sign.isspace() else 1.0
