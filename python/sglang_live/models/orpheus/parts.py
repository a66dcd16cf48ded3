"""Orpheus in the stages of talker and vocoder (models/family.py)."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.family import read_json
from sglang_live.models.orpheus.family import SNAC_FOLDER, voices_of
from sglang_live.models.orpheus.vocabulary import (
    AI_BEGIN_ID,
    CODES_PER_FRAME,
    HUMAN_BEGIN_ID,
    HUMAN_END_ID,
    SPEECH_BEGIN_ID,
    STOP_IDS,
    TEXT_END_ID,
    CodeReader,
)
from sglang_live.models.piece_talker import PieceTalker
from sglang_live.speakable.style import SpeechStyle

_FRAME_S = 2048 / 24_000  # SNAC's


class OrpheusTalker(PieceTalker):
    steps_per_frame, frame_s, chunk_frames = CODES_PER_FRAME, _FRAME_S, 4
    stop_ids = STOP_IDS
    style = SpeechStyle()
    # Reference settings (orpheus_tts, OrpheusModel.generate_tokens_sync).
    sampling: Mapping[str, Any] = MappingProxyType(
        {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3}
    )

    def __init__(self, path: Path):
        from transformers import AutoTokenizer

        self._path, self._tokenizer = path, AutoTokenizer.from_pretrained(path)
        self.voices = voices_of(read_json(path / "config.json"))

    def engine_args(self, cache_dir: Path) -> dict[str, Any]:
        return {"model_path": str(self._path)}

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        # With the tokenizer's own begin of text, as in training.
        ids = self._tokenizer.encode(f"{voice}: {text}", split_special_tokens=True)
        tail = (TEXT_END_ID, HUMAN_END_ID, AI_BEGIN_ID, SPEECH_BEGIN_ID)
        return [HUMAN_BEGIN_ID, *ids, *tail]

    def frames(self) -> CodeReader:
        return CodeReader()


class OrpheusDecoder:
    """SNAC, from the folder beside the checkpoint."""

    @staticmethod
    def from_pretrained(path: str | Path, device: Any, dtype: Any) -> Any:
        from sglang_live.models.codecs.snac import SnacDecoder

        return SnacDecoder.from_pretrained(Path(path) / SNAC_FOLDER, device, dtype)
