"""What a talker's prompt knows of voices: rows of a table of embeddings, named by ids.

The ids determine the embeddings, so that SGLang's radix tree can compare prompts, and requests
with the same voice share its KV. The stage knows which rows belong to a voice; the model fills
them when its weights load (engine/frame_lm.py).
"""

import hashlib
from collections.abc import Mapping

import numpy as np

# Ids travel as int64 and may pass through int32 tensors.
_MOST_IDS = 2**31 - 1


def content_ids(rows: np.ndarray, first_id: int) -> list[int]:
    """Of rows that a prompt brings along: one id each, a hash of the content of all, counted up.

    first_id: those before are of other embeddings.
    """
    digest = hashlib.blake2b(np.ascontiguousarray(rows).tobytes(), digest_size=8).digest()
    first = int.from_bytes(digest, "little")
    return [first_id + (first + n) % (_MOST_IDS - first_id) for n in range(len(rows))]


class VoiceTable:
    """
    Attributes:
        n_rows: of all voices.
    """

    def __init__(self, first_id: int, n_rows: Mapping[str, int]):
        """
        Args:
            first_id: that of row 0.
            n_rows: of each voice; they follow each other in this order.
        """
        self._ids: dict[str, range] = {}
        self.n_rows = 0
        for voice, n in n_rows.items():
            begin = first_id + self.n_rows
            self._ids[voice] = range(begin, begin + n)
            self.n_rows += n
        self._end = first_id + self.n_rows

    def ids(self, voice: str) -> list[int]:
        """Ids of the voice's rows in order; KeyError: it has none."""
        return list(self._ids[voice])

    def ids_of(self, rows: np.ndarray) -> list[int]:
        """Of rows that are none of its own; see content_ids."""
        return content_ids(rows, self._end)

    def __contains__(self, voice: str) -> bool:
        return voice in self._ids
