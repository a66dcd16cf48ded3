"""GLM-4-Voice in the thinker stage (models/family.py)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_live.core import HistoryItem, TextPart
from sglang_live.models.family import read_json
from sglang_live.models.glm4_voice.ears import GlmEars
from sglang_live.models.glm4_voice.family import (
    ASSISTANT,
    AUDIO,
    BEGIN,
    LONGEST_BLOCK,
    SYSTEM,
    TOKENIZER,
    USER,
    GlmVoiceSpec,
)
from sglang_live.models.glm4_voice.tokenizer import tokenizer_directory
from sglang_live.models.own_voice import OwnVoice
from sglang_live.models.prompt import Markup, Piece, PiecewisePrompt, Tokenizer, Words

# With these words it was trained to write text and speech in turns.
TASK = (
    "User will provide you with a speech instruction. Do it step by step. First, think about the "
    "instruction and respond in a interleaved manner, with 13 text token followed by 26 audio "
    "tokens. "
)
_OPENING = f"{ASSISTANT}streaming_transcription\n"
_SAMPLING = ("temperature", "top_p", "top_k")
# Three minutes of speech, and its text.
_MOST_IDS = 3 * 1125


class GlmPrompt(PiecewisePrompt):
    """The end of a response is the beginning of the user's next message."""

    def __init__(self, spec: GlmVoiceSpec, tokenizer: Tokenizer):
        super().__init__(tokenizer, (spec.special[USER],), ("", ""))

    def header(self, instructions: str) -> list[Piece]:
        task = f"{instructions}\n{TASK}" if instructions else TASK
        return [Markup("".join(BEGIN) + SYSTEM), self._words(f"\n{task}"), Markup(USER)]

    def item(self, item: HistoryItem) -> list[Piece]:
        """One message. A user's begins behind its role, which is the end of what is before it."""
        text = "".join(part.text for part in item.parts if isinstance(part, TextPart))
        ids = item.token_ids
        said = self._words(text) if ids is None else Words(ids)
        if item.role == "assistant":
            return [Markup(_OPENING), said, Markup(USER)]
        if item.role == "system":
            return [Markup(SYSTEM), self._words(f"\n{text}"), Markup(USER)]
        if ids is None and item.opens:
            return [self._words(f"\n{text}")]
        return [self._words("\n"), said] if item.opens else [said]

    def open_response(self) -> list[Piece]:
        return [Markup(_OPENING)]

    def close_response(self, *, model_wrote_end: bool) -> list[Piece]:
        return [] if model_wrote_end else [Markup(USER)]


class GlmThinker:
    """A ThinkerModel."""

    external_models, clip_form = "", None

    def __init__(self, path: Path):
        self._spec = spec = GlmVoiceSpec.load(path)
        begin, end = (spec.special[name] for name in AUDIO)
        self.ears = GlmEars(path / TOKENIZER, spec.first_code, begin, end)
        # A stretch of 13 ids of text is said by 26 frames of 80 ms.
        self.voice = OwnVoice(
            first_id=spec.first_code,
            n_codes=spec.n_codes,
            frame_s=0.08,
            chunk_frames=LONGEST_BLOCK,
            frames_per_token=26 / 13,
        )
        generation = path / "generation_config.json"
        found = read_json(generation) if generation.exists() else {}
        chosen = {name: found[name] for name in _SAMPLING if found.get(name) is not None}
        self.sampling: Mapping[str, float] = {**chosen, "max_new_tokens": _MOST_IDS}

    def engine_args(self, cache_dir: Path) -> Mapping[str, Any]:
        tokenizer = str(tokenizer_directory(self._spec.path, cache_dir))
        return {"tokenizer_path": tokenizer, "enable_multimodal": False}

    def prompt(self, tokenizer: Tokenizer) -> GlmPrompt:
        return GlmPrompt(self._spec, tokenizer)
