"""What a talker's prompt knows of voices: rows of a table of embeddings, named by ids.

The ids determine the embeddings, so that SGLang's radix tree can compare prompts, and requests
with the same voice share its KV. The stage knows which rows belong to a voice; the model fills
them when its weights load (engine/frame_lm.py).
"""

from collections.abc import Mapping


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

    def ids(self, voice: str) -> list[int]:
        """Ids of the voice's rows in order; KeyError: it has none."""
        return list(self._ids[voice])

    def __contains__(self, voice: str) -> bool:
        return voice in self._ids
