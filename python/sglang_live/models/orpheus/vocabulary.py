"""Ids of Orpheus' vocabulary, and frames of codes from the ids that it writes.

Behind Llama 3's own tokens come ten marks, then 4096 codes for each of the seven places of a frame.
The order of a frame is SNAC's (models/codecs/snac.py).
Source: orpheus_tts, engine_class.py and decoder.py (Apache-2.0).
"""

from sglang_live.models.piece_talker import WrongCodeError

TEXT_END_ID = 128009
SPEECH_BEGIN_ID, SPEECH_END_ID = 128257, 128258
HUMAN_BEGIN_ID, HUMAN_END_ID, AI_BEGIN_ID = 128259, 128260, 128261
FIRST_CODE_ID = 128266
CODEBOOK_SIZE, CODES_PER_FRAME = 4096, 7
END_OF_CODES_ID = FIRST_CODE_ID + CODEBOOK_SIZE * CODES_PER_FRAME
# The model ends at the first; the reference also ends at the second.
STOP_IDS = (SPEECH_END_ID, 49158)


class CodeReader:
    """A FrameReader. A frame that is not complete at the end is left out, as by the reference."""

    def __init__(self) -> None:
        self._codes: list[int] = []

    def add(self, ids: list[int]) -> list[list[int]]:
        frames = []
        for token in ids:
            first = FIRST_CODE_ID + CODEBOOK_SIZE * len(self._codes)
            if not first <= token < first + CODEBOOK_SIZE:
                raise WrongCodeError(
                    f"the talker wrote id {token} where code {len(self._codes)} of a frame is due, "
                    f"which is one of {first} to {first + CODEBOOK_SIZE - 1}"
                )
            self._codes.append(token - first)
            if len(self._codes) == CODES_PER_FRAME:
                frames.append(self._codes)
                self._codes = []
        return frames
