"""Step-Audio 2 mini in the thinker stage (models/family.py)."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_live.core import INPUT_RATE_HZ, AudioPart, HistoryItem, TextPart
from sglang_live.models.codecs.flow import AHEAD, CHUNK
from sglang_live.models.own_voice import OwnVoice
from sglang_live.models.prompt import Clip, Markup, Piece, PiecewisePrompt, Tokenizer, Words
from sglang_live.models.speech_lm.checkpoint import view_of_talker
from sglang_live.models.step_audio.family import (
    AUDIO_BEGIN,
    AUDIO_END,
    AUDIO_PLACE,
    BEGIN,
    END,
    SPEECH,
    StepAudioSpec,
)
from sglang_live.models.step_audio.hearing import PART_S

# By such a name SGLang knows that a model hears (engine/thinker.py).
ARCHITECTURE = "Qwen2AudioForConditionalGeneration"
_ENGINE = "sglang_live.models.step_audio.engine"
# Between instructions and functions; a sign that no text has.
_TOOLS = "\x1d"
_ROLES = {"user": "human", "tool": "input"}
# Of the published programs. SGLang's penalty is of what the response has said, but for its newest
# token where steps overlap; in transformers, which they use, of the prompt, too.
_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.05, "max_new_tokens": 4096}


class StepAudioPrompt(PiecewisePrompt):
    """A message begins with a token that is the end of what is before it."""

    def __init__(self, spec: StepAudioSpec, tokenizer: Tokenizer):
        super().__init__(tokenizer, (spec.special[END],), ("", ""))
        # Words are before all control tokens of speech, and codes behind them.
        self._n_words = spec.special[AUDIO_BEGIN]

    def header(self, instructions: str) -> list[Piece]:
        said, _, tools = instructions.partition(_TOOLS)
        roles = ("system", said), ("tool_json_schemas", tools)
        written = [self._words(f"{role}\n{text}") for role, text in roles if text]
        ends = [Markup(END + BEGIN)] * len(written)
        return [Markup(BEGIN), *(one for both in zip(written, ends, strict=True) for one in both)]

    def with_functions(self, instructions: str, functions: list[str]) -> str:
        """They are a message of their own."""
        tools = [{"type": "function", "function": json.loads(text)} for text in functions]
        written = f"{_TOOLS}{json.dumps(tools, ensure_ascii=False)}" if tools else ""
        return instructions.replace(_TOOLS, " ") + written

    def item(self, item: HistoryItem) -> list[Piece]:
        return [*self._body(item), Markup(END + BEGIN)]

    def open_response(self) -> list[Piece]:
        return [Markup(f"assistant\n{SPEECH}")]

    def close_response(self, *, model_wrote_end: bool) -> list[Piece]:
        return [Markup(BEGIN if model_wrote_end else END + BEGIN)]

    def text_of(self, token_ids: list[int]) -> str:
        """Those that fill the place of text, where speech is longer, have none."""
        return super().text_of([token for token in token_ids if token < self._n_words])

    def _body(self, item: HistoryItem) -> list[Piece]:
        role = f"{_ROLES.get(item.role, item.role)}\n"
        if item.token_ids is not None:
            speech = SPEECH if item.role == "assistant" else ""
            return [Markup(role + speech), Words(item.token_ids)]
        pieces: list[Piece] = [Markup(role)]
        for part in item.parts:
            if isinstance(part, AudioPart):
                pieces += [Clip(AudioPart(pcm), _PLACE) for pcm in parts_of(part.pcm)]
            elif isinstance(part, TextPart) and part.text:
                # A token may span the role's newline and the text.
                begins = pieces == [Markup(role)]
                pieces = [] if begins else pieces
                pieces.append(self._words(role * begins + part.text))
        return pieces


_PLACE = f"{AUDIO_BEGIN}{AUDIO_PLACE}{AUDIO_END}"


def parts_of(pcm: Any) -> list[Any]:
    """[n] in parts that the encoder hears."""
    n = PART_S * INPUT_RATE_HZ
    return [pcm[at : at + n] for at in range(0, len(pcm), n)]


class StepAudioThinker:
    """A ThinkerModel."""

    external_models, clip_form, ears = _ENGINE, None, None
    sampling: Mapping[str, float] = _SAMPLING

    def __init__(self, path: Path):
        self._spec = spec = StepAudioSpec.load(path)
        # The decoder's first chunk, which is the longest, has three codes that it looks ahead.
        self.voice = OwnVoice(
            first_id=spec.first_code,
            n_codes=spec.n_codes,
            frame_s=0.04,
            chunk_frames=CHUNK + AHEAD,
            frames_per_token=4.0,
        )
        # SGLang finds processors by this variable, as it finds classes of models.
        os.environ["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"] = _ENGINE

    def engine_args(self, cache_dir: Path) -> Mapping[str, Any]:
        view = view_of_talker(self._spec.path, cache_dir, self._config, ("",), TOKENIZER_FILES)
        return {
            "model_path": str(view),
            "tokenizer_path": str(view),
            "enable_multimodal": True,
        }

    def prompt(self, tokenizer: Tokenizer) -> StepAudioPrompt:
        return StepAudioPrompt(self._spec, tokenizer)

    def _config(self, config: dict[str, Any]) -> dict[str, Any]:
        """A Qwen2's: transformers does not know this model's type without the code of its
        checkpoint."""
        return {
            **self._spec.text,
            "model_type": "qwen2",
            "architectures": [ARCHITECTURE],
            "tie_word_embeddings": False,
            "eos_token_id": self._spec.special[END],
            "bos_token_id": None,
            "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
            "audio_encoder_config": dict(self._spec.encoder),
        }


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json"),
)
