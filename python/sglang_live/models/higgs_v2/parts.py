"""Higgs Audio v2 in the talker stage (models/family.py)."""

import json
import math
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.higgs_v2.family import VOICE, HiggsSpec
from sglang_live.models.piece_talker import FrameTalker
from sglang_live.models.speech_lm.checkpoint import view_of_talker
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.models.voice_files import read_recording, voice_files, words_of
from sglang_live.speakable.style import SpeechStyle

TALKER_ARCHITECTURE = "HiggsBackbone"
PREFIXES = ("model.", "audio_lm_head.")
# The reference's prompt; what the voice is like would be a part of the scene.
_SYSTEM = "Generate audio following instruction."
_SCENE = "Audio is recorded from a quiet room."
_BEGIN, _END = "<|begin_of_text|>", "<|eot_id|>"
_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
_AUDIO, _AUDIO_END = "<|audio_out_bos|>", "<|audio_eos|>"
_MARKS = (
    *(_BEGIN, _END, _AUDIO, _AUDIO_END),
    *("<|start_header_id|>", "<|scene_desc_start|>", "<|scene_desc_end|>"),
)
# A row of the table: the frame of marks with which every stream begins.
_BEGIN_ROW = "begin"


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    return view_of_talker(checkpoint, cache, _talker_config, PREFIXES)


def _talker_config(config: dict[str, Any]) -> dict[str, Any]:
    n_ids = config["num_codebooks"] * config["codebook_size"]
    return {
        **config,
        "model_type": "llama",
        "architectures": [TALKER_ARCHITECTURE],
        "bos_token_id": None,
        "pad_token_id": None,
        "vocab_size": n_ids,
        "text_vocab_size": config["vocab_size"],
        "eos_token_id": n_ids - 1,
        "tie_word_embeddings": False,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
    }


class HiggsTalker(FrameTalker):
    external_models = "sglang_live.models.higgs_v2.engine"
    chunk_frames = 4
    style = SpeechStyle()
    # Reference settings (boson-ai/higgs-audio, examples/generation.py).
    temperature, repetition_penalty = 1.0, 1.0

    def __init__(self, path: Path, voices: Path | None = None):
        """voices: directory of recordings whose voices it takes on, each with its words."""
        from transformers import AutoTokenizer

        self._spec = spec = HiggsSpec.load(path)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        ids = self._tokenizer.convert_tokens_to_ids(list(_MARKS))
        lacking = [
            mark
            for mark, id_ in zip(_MARKS, ids, strict=True)
            if id_ is None or id_ == self._tokenizer.unk_token_id
        ]
        if lacking:
            raise BadInputError(f"{path}: its tokenizer lacks {', '.join(lacking)}")
        n_ids = spec.n_books * spec.book_size
        self.codes_per_frame, self.end_id = spec.n_books, n_ids - 1
        self.lag_steps = spec.n_books - 1
        self.frame_s = math.prod(spec.codec.decoder_rates) / spec.codec.sampling_rate
        self.ahead_frames = spec.codec.ahead_frames
        self._recordings = {} if voices is None else voice_files(voices)
        self.voices = (VOICE, *self._recordings)
        n_rows = {name: self._n_steps(file) for name, file in self._recordings.items()}
        self._table = VoiceTable(n_ids + spec.text_vocab, {_BEGIN_ROW: 1, **n_rows})
        system = f"{_SYSTEM}\n\n<|scene_desc_start|>\n{_SCENE}\n<|scene_desc_end|>"
        self._system = self._encode(f"{_BEGIN}{_HEAD.format('system')}{system}{_END}")
        self._user = self._encode(_HEAD.format("user"))
        self._assistant = self._encode(f"{_END}{_HEAD.format('assistant')}{_AUDIO}")
        self._said = {
            name: [*self._turn(words_of(file)), *self._table.ids(name), *self._encode(_AUDIO_END)]
            for name, file in self._recordings.items()
        }

    def _n_steps(self, file: Path) -> int:
        """Of a recording, as Delay.steps has them. What is no whole frame is left out."""
        codec = self._spec.codec
        n_samples = len(read_recording(file, codec.sampling_rate))
        return n_samples // math.prod(codec.decoder_rates) + self._spec.n_books + 1

    def engine_args(self, cache_dir: Path, n_rows: int) -> dict[str, Any]:
        return {
            "model_path": str(talker_view(self._spec.path, cache_dir)),
            # The model keeps tensors per request row (speech_lm/talker_state.py).
            "json_model_override_args": json.dumps(
                {
                    "live_rows": n_rows,
                    "live_codes": self._spec.codec.codebook_size,
                    "live_voice_rows": self._table.n_rows,
                    "live_checkpoint": str(self._spec.path),
                    "live_recordings": [str(file) for file in self._recordings.values()],
                }
            ),
        }

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        said = [*self._said[voice], *self._encode(_END)] if voice in self._said else []
        return [*self._system, *said, *self._turn(text.strip()), *self._table.ids(_BEGIN_ROW)]

    def _turn(self, text: str) -> list[int]:
        """A text of the user, up to the sound of it."""
        return [*self._user, *self._encode(text, is_text=True), *self._assistant]

    def _encode(self, text: str, *, is_text: bool = False) -> list[int]:
        """is_text: it makes no marks."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=is_text)
        first = self._spec.n_books * self._spec.book_size
        return [first + token for token in ids]
