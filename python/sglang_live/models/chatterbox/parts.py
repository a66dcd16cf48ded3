"""Chatterbox in the talker stage (models/family.py)."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.encoder import RecordingEncoder
from sglang_live.models.chatterbox.family import (
    END_ID,
    FRAME_S,
    HEAD_DIM,
    TEXT_BEGIN_ID,
    TEXT_END_ID,
    TOKENIZER,
    WEIGHTS,
    T3Spec,
    is_recording,
    voice_paths,
)
from sglang_live.models.chatterbox.voices import (
    COND,
    TABLES,
    joined_values,
    read_voice,
    split_values,
    voice_rows,
)
from sglang_live.models.chatterbox.weights import read_part
from sglang_live.models.codecs.flow.recording import values_of
from sglang_live.models.piece_talker import FrameTalker, PiecePrompt
from sglang_live.models.speech_lm.checkpoint import view_of_file
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.speakable.style import SpeechStyle

TALKER_ARCHITECTURE = "ChatterboxT3"
# A row of the table before those of the voices: the mark with which speech begins.
_BEGIN_ROW = ""
_SPACE = "[SPACE]"


def talker_config(spec: T3Spec) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": [TALKER_ARCHITECTURE],
        "vocab_size": spec.n_ids,
        "text_vocab_size": spec.n_text_ids,
        "n_text_places": spec.n_text_places,
        "n_speech_places": spec.n_speech_places,
        "n_voice_rows": spec.n_voice_rows,
        "eos_token_id": END_ID,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "hidden_size": spec.width,
        "intermediate_size": spec.inner,
        "num_hidden_layers": spec.n_layers,
        # Both prompts of a pair have the KV of one request (speech_lm/engine/pair.py).
        "num_attention_heads": 2 * spec.n_heads,
        "num_key_value_heads": 2 * spec.n_kv_heads,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        # Source: LLAMA_520M_CONFIG_DICT.
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": spec.n_voice_rows + spec.n_text_places + spec.n_speech_places,
        "dtype": spec.dtype,
    }


class ChatterboxTalker(FrameTalker):
    external_models = "sglang_live.models.chatterbox.engine"
    frame_s, codes_per_frame = FRAME_S, 1
    # A piece sounds as a whole. Source: max_new_tokens of ChatterboxTTS.generate.
    chunk_frames = 1000
    end_id = END_ID
    style = SpeechStyle(folds=True)
    # Reference settings (ChatterboxTTS.generate).
    temperature, repetition_penalty = 0.8, 1.2

    def __init__(self, path: Path, voices: Path | None = None):
        """voices: directory of recordings whose voices it takes on."""
        self._spec = spec = T3Spec.load(path)
        self._files = voice_paths(path, voices)
        for file in self._files.values():
            if not is_recording(file):
                read_voice(file)  # what is wrong with it is said before an engine starts
        self.voices = tuple(self._files)
        self._tokenizer, self._space = _tokenizer(path / TOKENIZER)
        # Text never becomes a special token.
        self._tokenizer.encode_special_tokens = True
        rows = {_BEGIN_ROW: 1} | dict.fromkeys(self._files, spec.n_voice_rows)
        self._table = VoiceTable(spec.n_ids + spec.n_text_ids, rows)

    def engine_args(self, cache_dir: Path, n_rows: int) -> dict[str, Any]:
        view = view_of_file(self._spec.path / WEIGHTS, cache_dir, talker_config(self._spec))
        return {
            "model_path": str(view),
            # The model keeps tensors per request row (speech_lm/talker_state.py).
            "json_model_override_args": json.dumps(
                {
                    "live_rows": n_rows,
                    "live_voice_rows": self._table.n_rows,
                    "live_voices": [str(file) for file in self._files.values()],
                    "live_checkpoint": str(self._spec.path),
                }
            ),
        }

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        return self._prompt(self._table.ids(voice), text)

    # --- voices that a response brings along ---

    def make_voice(self, samples: np.ndarray) -> np.ndarray:
        rows = voice_rows(self._encoder.voice(samples), self._of_voices)
        return joined_values(rows, values_of(*self._encoder.known(samples)))

    def prompt_in(self, speaker: np.ndarray, text: str) -> PiecePrompt:
        of_t3, _ = split_values(speaker)
        shape = self._spec.n_voice_rows, self._spec.width
        if of_t3.size != shape[0] * shape[1]:
            raise BadInputError(f"another model made the voice: {of_t3.size} values")
        rows = of_t3.reshape(shape)
        return PiecePrompt(self._prompt(self._table.ids_of(rows), text), rows)

    @cached_property
    def _encoder(self) -> RecordingEncoder:
        return RecordingEncoder(self._spec.path)

    @cached_property
    def _of_voices(self) -> dict[str, Tensor]:
        """See voice_rows."""
        file = self._spec.path / WEIGHTS
        found = read_part(file, COND)
        for table in TABLES:
            found |= {table + name: one for name, one in read_part(file, table).items()}
        return {name: one.to(torch.float32) for name, one in found.items()}

    def _prompt(self, voice_ids: list[int], text: str) -> list[int]:
        tokens = [TEXT_BEGIN_ID]
        for n, word in enumerate(as_trained(text).split(" ")):
            tokens += [self._space] * (n > 0) + self._ids(word)
        text_ids = [self._spec.n_ids + token for token in (*tokens, TEXT_END_ID)]
        # The mark occurs twice, as in the reference.
        return [*voice_ids, *text_ids, *self._table.ids(_BEGIN_ROW) * 2]

    def _ids(self, word: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(word, add_special_tokens=False).ids
        return ids


def as_trained(text: str) -> str:
    """Punctuation as the model knows it, of a text that can be spoken. Source: punc_norm."""
    text = text[:1].upper() + text[1:]
    text = text.replace(":", ",").replace(";", ", ").replace(" ,", ",").rstrip(" ")
    return text if text.endswith((".", "!", "?", "-", ",")) else f"{text}."


def _tokenizer(file: Path) -> tuple[Tokenizer, int]:
    """It, and its token for a space. Raises BadInputError if it is broken, or another one."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise BadInputError(f"cannot read {file}: {error}") from error
    marks = {"[START]": TEXT_BEGIN_ID, "[STOP]": TEXT_END_ID}
    for name, token in marks.items():
        if tokenizer.token_to_id(name) != token:
            raise BadInputError(f"{file} is no tokenizer of Chatterbox: {name} is not {token}")
    if (space := tokenizer.token_to_id(_SPACE)) is None:
        raise BadInputError(f"{file} is no tokenizer of Chatterbox: it lacks {_SPACE}")
    return tokenizer, space
