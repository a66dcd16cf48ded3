"""CosyVoice in the talker stage (models/family.py)."""

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow import AHEAD, LONGEST_CHUNK, RECORDING_RATE_HZ
from sglang_live.models.cosyvoice.family import (
    BASE,
    FRAME_S,
    RATIO,
    WEIGHTS,
    Version,
    version_of,
)
from sglang_live.models.cosyvoice.voices import PromptVoice, read_voices
from sglang_live.models.family import read_json
from sglang_live.models.piece_talker import FrameTalker, PiecePrompt
from sglang_live.models.speech_lm.checkpoint import view_of_file
from sglang_live.models.speech_lm.mixing import MixedVoice
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.models.voice_files import read_recording, voice_files, words_of
from sglang_live.speakable.style import SpeechStyle

if TYPE_CHECKING:
    from sglang_live.models.cosyvoice.encoder import RecordingEncoder

TALKER_ARCHITECTURE = "CosyVoiceLM"
# Rows of the table: the marks before the text, and between it and the codes.
BEGIN_ROW, TASK_ROW = "begin", "task"
# Codes for each token of the text at least. Source: Qwen2LM.inference.
LEAST_CODES = 2
_SCRIPTS = frozenset(("LATIN", "CJK", "HIRAGANA", "KATAKANA", "HANGUL"))
# Before the words of a recording, for a version that needs an instruction.
_INSTRUCTION = "You are a helpful assistant."
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endofprompt|>"]


def talker_config(path: Path, version: Version) -> dict[str, Any]:
    """Raises BadInputError if the config of its language model lacks something."""
    base = read_json(path / BASE / "config.json")
    if base.get("model_type") != "qwen2" or "vocab_size" not in base:
        raise BadInputError(f"{path / BASE}/config.json is no Qwen2")
    return {
        **base,
        "architectures": [TALKER_ARCHITECTURE],
        "vocab_size": version.n_ids,
        "text_vocab_size": base["vocab_size"],
        "eos_token_id": version.end_id,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "dtype": base.get("dtype") or base.get("torch_dtype") or "bfloat16",
        "prompt_ids": version.prompt_ids,
        "late_id": version.late_id,
        "fill_id": version.fill_id,
    }


class CosyVoiceTalker(FrameTalker):
    external_models = "sglang_live.models.cosyvoice.engine"
    frame_s, codes_per_frame = FRAME_S, 1
    # Behind a code its sound needs those of the look-ahead.
    chunk_frames, ahead_frames = LONGEST_CHUNK, AHEAD
    # Without graphs 9,000 launches, and some time for the codes (benchmark/speaking_models.py).
    decode_s = 0.5
    style = SpeechStyle(scripts=_SCRIPTS, english=False, says_code="", says_table="")
    # The reference has neither.
    temperature, repetition_penalty = 1.0, 1.0

    def __init__(self, path: Path, voices: Path | None = None):
        """voices: directory of recordings whose voices it takes on, each with its words."""
        from transformers import AutoTokenizer

        self._path, self._version = path, version_of(path)
        self.end_id = self._version.end_id
        self.silent_codes = self._version.silent_codes
        self._config = talker_config(path, self._version)
        self._tokenizer = AutoTokenizer.from_pretrained(path / BASE)
        # As the reference adds them: one that the tokenizer lacks gets the next id.
        self._tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
        self._instructed = self._tokenizer.convert_tokens_to_ids(_SPECIAL[-1])
        self._voices = read_voices(path, self._config["text_vocab_size"])
        for name, voice in self._voices.items():
            if self._version.is_instructed and self._instructed not in voice.text_ids:
                raise BadInputError(
                    f"the words of voice {name!r} lack {_SPECIAL[-1]}: CosyVoice 3 needs "
                    f"'{_INSTRUCTION}{_SPECIAL[-1]}' before them"
                )
        self._before = (
            [*self._ids(_INSTRUCTION), self._instructed] if self._version.is_instructed else []
        )
        if voices is not None:
            self._voices |= self._recorded(voices)
        self.voices = tuple(self._voices)
        first_row = self._version.n_ids + self._config["text_vocab_size"]
        self._table = VoiceTable(first_row, {BEGIN_ROW: 1, TASK_ROW: 1})
        self._config |= {
            "task_id": self._table.ids(TASK_ROW)[0],
            "again_id": first_row + self._table.n_rows,
        }

    def engine_args(self, cache_dir: Path, n_rows: int) -> dict[str, Any]:
        return {
            "model_path": str(view_of_file(self._path / WEIGHTS, cache_dir, self._config)),
            # The model keeps tensors per request row (speech_lm/talker_state.py).
            "json_model_override_args": json.dumps(
                {"live_rows": n_rows, "live_voice_rows": self._table.n_rows}
            ),
        }

    def prompt(self, voice: str, text: str) -> list[int]:
        return self._prompt(self._voice(voice), text)

    # --- voices that a response brings along, whose words nothing tells ---

    def make_voice(self, samples: np.ndarray) -> np.ndarray:
        from sglang_live.models.codecs.flow.recording import values_of

        return values_of(*self._encoder.known(samples))

    def prompt_in(self, speaker: np.ndarray, text: str) -> PiecePrompt:
        """As of inference_cross_lingual and inference_instruct2: the flow alone goes on from the
        recording."""
        from sglang_live.models.codecs.flow.recording import voice_in

        voice_in(speaker)
        return PiecePrompt(self._prompt(PromptVoice(self._before, []), text))

    def _prompt(self, known: PromptVoice, text: str) -> list[int]:
        return [
            *self._table.ids(BEGIN_ROW),
            *self._prompt_ids(known.text_ids),
            *self.words(text),
            *self._table.ids(TASK_ROW),
            *known.codes,
        ]

    def mixed_voice(self, voice: str) -> MixedVoice:
        known, n_head = self._voice(voice), 0
        if self._version.is_instructed:
            n_head = known.text_ids.index(self._instructed) + 1
        words = self._prompt_ids(known.text_ids)
        return MixedVoice(
            ratio=RATIO,
            head=[*self._table.ids(BEGIN_ROW), *words[:n_head]],
            words=words[n_head:],
            codes=known.codes,
            task_id=self._config["task_id"],
            again_id=self._config["again_id"],
        )

    def words(self, text: str) -> list[int]:
        return self._prompt_ids(self._ids(text))

    def _voice(self, name: str) -> PromptVoice:
        if name not in self._voices:
            raise BadInputError(f"voice {name!r} is not one of {self.voices}")
        return self._voices[name]

    def _prompt_ids(self, tokens: list[int]) -> list[int]:
        return [self._version.n_ids + token for token in tokens]

    @cached_property
    def _encoder(self) -> "RecordingEncoder":
        from sglang_live.models.cosyvoice.encoder import RecordingEncoder

        return RecordingEncoder(self._path)

    def _recorded(self, directory: Path) -> dict[str, PromptVoice]:
        from sglang_live.models.cosyvoice.encoder import RecordingEncoder

        encoder = RecordingEncoder(self._path)  # its 500 MB are free again behind the last one
        return {
            name: PromptVoice(
                [*self._before, *self._ids(words_of(file))],
                encoder.codes(read_recording(file, RECORDING_RATE_HZ)).tolist(),
            )
            for name, file in voice_files(directory).items()
        }

    def least_frames(self, text: str) -> int:
        return LEAST_CODES * len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids
