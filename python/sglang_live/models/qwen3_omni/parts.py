"""Qwen3-Omni in the stages of thinker and talker (models/family.py)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sglang_live.errors import BadInputError
from sglang_live.models.prompt import Tokenizer
from sglang_live.models.qwen3_omni.prompt import ChatPrompt
from sglang_live.models.qwen3_omni.spec import FRAME_RATE_HZ, Qwen3OmniSpec
from sglang_live.models.qwen3_omni.stage_view import talker_view
from sglang_live.models.speech_lm.talker_ids import TalkerIds

_ENGINE = "sglang_live.models.qwen3_omni.engine"


class OmniThinker:
    """A ThinkerModel."""

    external_models = _ENGINE
    engine_args: Mapping[str, Any] = {"enable_multimodal": True}

    def __init__(self, path: Path):
        self._spec = spec = Qwen3OmniSpec.load(path)
        self.sampling, self.clip_form = spec.sampling, spec.clip_form

    def prompt(self, tokenizer: Tokenizer) -> ChatPrompt:
        return ChatPrompt(self._spec, tokenizer)


class OmniTalker:
    """A TalkerModel."""

    external_models = _ENGINE
    step_s, chunk_steps = 1 / FRAME_RATE_HZ, 4
    # Reference settings (transformers, Qwen3OmniMoeForConditionalGeneration.generate).
    temperature, repetition_penalty = 0.9, 1.05
    reads = None

    def __init__(self, path: Path):
        self._spec = spec = Qwen3OmniSpec.load(path)
        self._ids = TalkerIds(spec.codec_vocab, spec.thinker_vocab)
        newline_id = _newline_id(path)
        self._role = [spec.im_start_id, spec.assistant_id, newline_id]
        self.voices, self.text_end_id = spec.voices, spec.tts_eos_id
        self.first_state_id = self._ids.audio
        self.warm_up_prompt = self.response(self.voices[0], newline_id)

    def engine_args(self, cache_dir: Path, n_rows: int, max_frames: int) -> dict[str, Any]:
        return {
            "model_path": str(talker_view(self._spec.path, cache_dir)),
            # The model keeps tensors per request row (see talker_state.py).
            "json_model_override_args": json.dumps(
                {"live_rows": n_rows, "live_max_frames": max_frames}
            ),
        }

    def message(self, token_ids: list[int], states: np.ndarray | None) -> list[int]:
        return self._ids.user_segment(token_ids, self._spec.audio_pad_id, states)

    def response(self, voice: str, first_id: int) -> list[int]:
        spec = self._spec
        speaker = spec.speakers.get(voice.lower())
        if speaker is None:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        codes = [spec.codec_nothink_id, spec.codec_think_bos_id, spec.codec_think_eos_id, speaker]
        return self._ids.response_prefix(self._role, codes, first_id)


def _newline_id(checkpoint: Path) -> int:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(checkpoint).encode(
        "\n", add_special_tokens=False
    )
    return ids[0]
