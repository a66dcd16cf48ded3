"""Qwen3-TTS in the talker stage (models/family.py)."""

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_live.errors import BadInputError
from sglang_live.models.family import TextReader, read_json
from sglang_live.models.qwen3_tts.family import Qwen3TTSSpec
from sglang_live.models.speech_lm.checkpoint import view_of_talker
from sglang_live.models.speech_lm.talker_ids import TalkerIds
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.models.voice_files import voice_files
from sglang_live.speakable.style import SpeechStyle

if TYPE_CHECKING:
    from sglang_live.models.qwen3_tts.speaker import SpeakerEncoder

TALKER_ARCHITECTURE = "Qwen3TTSTalker"
PREFIXES = ("talker.",)


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    return view_of_talker(checkpoint, cache, _talker_config, PREFIXES)


def _talker_config(config: dict[str, Any]) -> dict[str, Any]:
    talker = dict(config["talker_config"])
    return {
        **{key: value for key, value in talker.items() if key != "code_predictor_config"},
        "model_type": "qwen3",
        "architectures": [TALKER_ARCHITECTURE],
        # Text and frames advance all three axes of the talker's rotary embedding together, which
        # is the plain rotary embedding.
        "rope_scaling": None,
        "eos_token_id": talker["codec_eos_token_id"],
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        "talker": {
            **talker,
            "tts_bos_token_id": config["tts_bos_token_id"],
            "tts_pad_token_id": config["tts_pad_token_id"],
        },
    }


_ROLE = "<|im_start|>assistant\n"


class TTSTalker:
    """A TalkerModel that reads text: with the prompt of the reference's streaming mode, in which
    every frame gets the next token of the text."""

    external_models = "sglang_live.models.qwen3_tts.engine"
    step_s, chunk_steps = 0.08, 4
    # Reference settings (qwen_tts, Qwen3TTSForConditionalGeneration.generate).
    temperature, repetition_penalty = 0.9, 1.05

    def __init__(self, path: Path, voices: Path | None = None):
        """voices: directory of recordings whose speakers' voices it takes on."""
        from transformers import AutoTokenizer

        self._spec = spec = Qwen3TTSSpec.load(path)
        self._ids = TalkerIds(spec.codec_vocab, spec.text_vocab)
        tokenizer = AutoTokenizer.from_pretrained(path)
        self._hidden = read_json(path / "config.json")["talker_config"]["hidden_size"]
        self._role = tokenizer.encode(_ROLE, add_special_tokens=False)
        if self._role[0] != spec.im_start_id or len(self._role) != 3:
            raise BadInputError(f"{path}: its tokenizer makes {self._role} of {_ROLE!r}")

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True
            )
            return ids

        # It reads figures by itself, in the language of the text.
        style = SpeechStyle(scripts=spec.scripts, english=False, says_code="", says_table="")
        self.reads = TextReader(encode, style)
        self._recordings = {} if voices is None else voice_files(voices)
        self._cloned = VoiceTable(self._ids.audio, dict.fromkeys(self._recordings, 1))
        self.voices = (*spec.voices, *self._recordings)
        self.text_end_id = spec.tts_eos_id
        self.first_state_id = self._ids.audio + self._cloned.n_rows
        self.warm_up_prompt = self.response(self.voices[0], encode("Hello")[0])

    def engine_args(self, cache_dir: Path, n_rows: int, max_frames: int) -> dict[str, Any]:
        return {
            "model_path": str(talker_view(self._spec.path, cache_dir)),
            # The model keeps tensors per request row (speech_lm/talker_state.py).
            "json_model_override_args": json.dumps(
                {
                    "live_rows": n_rows,
                    "live_max_frames": max_frames,
                    "live_checkpoint": str(self._spec.path),
                    "live_recordings": [str(file) for file in self._recordings.values()],
                }
            ),
        }

    def response(self, voice: str, first_id: int) -> list[int]:
        cloned: list[int] = []
        if voice in self._cloned:
            codes, cloned = self._spec.no_language, self._cloned.ids(voice)
        elif (known := self._spec.speakers.get(voice.lower())) is not None:
            codes = known
        else:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        return self._ids.response_prefix(self._role, list(codes), first_id, cloned)

    # --- voices that a prompt brings along: a SpeakerReader ---

    @cached_property
    def _encoder(self) -> "SpeakerEncoder":
        from sglang_live.models.qwen3_tts.speaker import SpeakerEncoder

        return SpeakerEncoder.from_pretrained(self._spec.path)

    def make_voice(self, samples: np.ndarray) -> np.ndarray:
        if not self._spec.clones_voices:
            raise BadInputError(f"{self._spec.path} has no speaker encoder")
        speaker: np.ndarray = self._encoder.embed(samples)[None].numpy()
        return speaker

    def response_in(self, speaker: np.ndarray, first_id: int) -> tuple[list[int], int]:
        if speaker.shape != (1, self._hidden):
            raise BadInputError(f"another model made the voice: {speaker.shape} values")
        [key] = self._ids.state_keys(speaker, self._cloned.n_rows)
        codes = list(self._spec.no_language)
        return (
            self._ids.response_prefix(self._role, codes, first_id, [key]),
            len(self._role) + len(codes),
        )
