"""Qwen3-Omni in the stages of thinker and talker (models/family.py)."""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from sglang_live.core import (
    VIDEO_FPS,
    AudioPart,
    HistoryItem,
    ImagePart,
    Medium,
    TextPart,
    VideoPart,
)
from sglang_live.errors import BadInputError
from sglang_live.models.prompt import Clip, Markup, Piece, TalkerReadPrompt, Tokenizer, Words
from sglang_live.models.qwen3_omni.family import FRAME_RATE_HZ, Qwen3OmniSpec
from sglang_live.models.speech_lm.checkpoint import view_of_talker
from sglang_live.models.speech_lm.talker_ids import TalkerIds

TALKER_ARCHITECTURE = "Qwen3OmniTalker"
# The talker projects text through the thinker's embedding table.
THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"
PREFIXES = ("talker.", THINKER_EMBEDDING)


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    return view_of_talker(checkpoint, cache, _talker_config, PREFIXES)


def _talker_config(config: dict) -> dict:
    talker, thinker = config["talker_config"], config["thinker_config"]
    text = dict(talker["text_config"])
    rope = text.pop("rope_parameters", None) or {}
    scaling = text.get("rope_scaling") or {}  # in older checkpoints
    return {
        **text,
        "model_type": "qwen3_moe",
        "architectures": [TALKER_ARCHITECTURE],
        "num_experts": text.get("num_experts") or text["num_local_experts"],
        "rope_theta": rope.get("rope_theta") or text["rope_theta"],
        # Text and audio advance all three axes of the talker's rotary embedding together, which
        # is the plain rotary embedding. Pictures do not (engine/talker.py: _TalkerLayer).
        "rope_scaling": None,
        "eos_token_id": talker["codec_eos_token_id"],
        "bos_token_id": None,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        "talker": {
            **{k: v for k, v in talker.items() if k != "text_config"},
            "mrope_section": (rope or scaling).get("mrope_section", [24, 20, 20]),
            "thinker_vocab_size": thinker["text_config"]["vocab_size"],
            "tts_bos_token_id": config["tts_bos_token_id"],
            "tts_pad_token_id": config["tts_pad_token_id"],
        },
    }


_SYSTEM = "<|im_start|>system\n", "<|im_end|>"


class ChatPrompt(TalkerReadPrompt):
    def __init__(self, spec: Qwen3OmniSpec, tokenizer: Tokenizer):
        super().__init__(tokenizer, spec.end_of_turn_ids, _SYSTEM)
        self._spec = spec
        self.script_style = spec.script_style
        self.gives_up = spec.gives_up
        self.placeholders = spec.placeholders
        self.newline_id = self.markup_ids("\n")[0]

    def header(self, instructions: str) -> list[Piece]:
        if not instructions:
            # An empty prefill is impossible, and every history begins with this token.
            return [Markup("<|im_start|>")]
        return [
            Markup("<|im_start|>"),
            self._words(f"system\n{instructions}"),
            Markup("<|im_end|>\n<|im_start|>"),
        ]

    def item(self, item: HistoryItem) -> list[Piece]:
        """One message. Its leading `<|im_start|>` is the end of the pieces before."""
        return [*self._body(item), *([Markup("<|im_end|>\n<|im_start|>")] if item.closes else [])]

    def open_response(self) -> list[Piece]:
        return [Markup("assistant\n")]

    def close_response(self, *, model_wrote_end: bool) -> list[Piece]:
        return [Markup("\n<|im_start|>" if model_wrote_end else "<|im_end|>\n<|im_start|>")]

    def segment_ids(self, item: HistoryItem, n_places: list[int]) -> list[int]:
        places = iter(n_places)
        ids: list[int] = []
        begin = [Markup("<|im_start|>")] if item.opens else []
        end = [Markup("<|im_end|>\n")] if item.closes else []
        for piece in (*begin, *self._body(item), *end):
            match piece:
                case Markup():
                    ids += self.markup_ids(piece.text)
                case Words():
                    ids += piece.token_ids
                case Clip():
                    for token_id in self.markup_ids(piece.markup):
                        n = next(places) if token_id in self.placeholders else 1
                        ids += [token_id] * n
        return ids

    def _body(self, item: HistoryItem) -> list[Piece]:
        """Role and content of a message, or of a piece of one."""
        if not (item.opens and item.closes):
            [audio] = item.parts
            assert isinstance(audio, AudioPart)  # only speech is split into several items
            clip = _clip(audio, begins=item.opens, ends=item.closes)
            return [Markup(f"{item.role}\n"), clip] if item.opens else [clip]
        role = Markup(f"{'user' if item.role == 'tool' else item.role}\n")
        if item.token_ids is not None:
            return [role, Words(item.token_ids)]
        pieces: list[Piece] = [role]
        for _, group in groupby(item.parts, key=type):
            parts = list(group)
            pieces += [_clip(part) for part in parts if not isinstance(part, TextPart)]
            text = "".join(part.text for part in parts if isinstance(part, TextPart))
            if text:
                # A token may span two texts, or the role's newline and the text after it.
                if pieces == [role]:
                    pieces = [self._words(role.text + text)]
                else:
                    pieces.append(self._words(text))
        return pieces


def _clip(medium: Medium, *, begins: bool = True, ends: bool = True) -> Clip:
    """begins, ends: whether the audio span begins, and ends, with this clip."""
    if isinstance(medium, ImagePart):
        return Clip(medium, "<|vision_start|><|image_pad|><|vision_end|>")
    if isinstance(medium, VideoPart):
        return Clip(medium, "<|vision_start|><|video_pad|><|vision_end|>")
    begin, end = "<|audio_start|>" * begins, "<|audio_end|>" * ends
    return Clip(medium, f"{begin}<|audio_pad|>{end}")


_ENGINE = "sglang_live.models.qwen3_omni.engine"


class OmniThinker:
    """A ThinkerModel."""

    external_models, ears, voice = _ENGINE, None, None

    def __init__(self, path: Path):
        self._spec = spec = Qwen3OmniSpec.load(path)
        self.sampling = spec.sampling
        self.clip_form = spec.clip_form

    def engine_args(self, cache_dir: Path) -> Mapping[str, Any]:
        # The processor takes the rate of frames that it was not told for one a second.
        video = {"fps": float(VIDEO_FPS)}
        return {"enable_multimodal": True, "mm_process_config": {"video": video}}

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
        self.voices = spec.voices
        self.text_end_id = spec.tts_eos_id
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
        return self._ids.user_segment(token_ids, self._spec.placeholders, states)

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
