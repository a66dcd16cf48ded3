"""Chatterbox Turbo in the talker stage (models/family.py)."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.encoder import RecordingEncoder
from sglang_live.models.chatterbox.family import (
    BEGIN_ID,
    END_ID,
    FRAME_S,
    HEAD_DIM,
    N_CODES,
    is_recording,
    voice_paths,
)
from sglang_live.models.chatterbox.voices import (
    SPEAKER_LAYER,
    joined_values,
    read_voice,
    split_values,
)
from sglang_live.models.chatterbox.weights import read_part
from sglang_live.models.chatterbox_turbo.family import TurboSpec
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ
from sglang_live.models.codecs.flow.recording import values_of
from sglang_live.models.piece_talker import FrameTalker, PiecePrompt
from sglang_live.models.speech_lm.checkpoint import view_of_file
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.models.voice_files import read_recording
from sglang_live.speakable.style import SpeechStyle

TALKER_ARCHITECTURE = "ChatterboxTurboT3"


def talker_config(spec: TurboSpec) -> dict[str, Any]:
    # Source: GPT2_MEDIUM_CONFIG.
    return {
        "model_type": "gpt2",
        "architectures": [TALKER_ARCHITECTURE],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "vocab_size": spec.n_ids,
        "text_vocab_size": spec.n_text_ids,
        "eos_token_id": END_ID,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "n_embd": spec.width,
        "n_inner": spec.inner,
        "n_layer": spec.n_layers,
        "n_head": spec.width // HEAD_DIM,
        "n_positions": spec.n_places,
        "n_ctx": spec.n_places,
        "dtype": spec.dtype,
    }


class TurboTalker(FrameTalker):
    external_models = "sglang_live.models.chatterbox_turbo.engine"
    frame_s, codes_per_frame = FRAME_S, 1
    # A piece sounds as a whole. Source: max_gen_len of T3.inference_turbo.
    chunk_frames = 1000
    end_id = END_ID
    style = SpeechStyle(folds=True)
    # Reference settings (ChatterboxTurboTTS.generate).
    temperature, repetition_penalty = 0.8, 1.2

    def __init__(self, path: Path, voices: Path | None = None):
        """voices: directory of recordings whose voices it takes on."""
        from transformers import AutoTokenizer

        self._spec = spec = TurboSpec.load(path)
        self._files = voice_paths(path, voices)
        # What is wrong with a voice is said before an engine starts.
        encoder, codes = RecordingEncoder(path), {}
        for name, file in self._files.items():
            if is_recording(file):
                codes[name] = encoder.codes(read_recording(file, RECORDING_RATE_HZ))
            else:
                codes[name] = read_voice(file, has_emotion=False).codes
        self._codes = {name: found.tolist() for name, found in codes.items()}
        self.voices = tuple(self._files)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        if len(self._tokenizer) > spec.n_text_ids:
            n = len(self._tokenizer)
            raise BadInputError(f"{path}: its tokenizer has {n} ids, T3 has {spec.n_text_ids}")
        # A row of each voice: its speaker.
        self._table = VoiceTable(spec.n_ids + spec.n_text_ids, dict.fromkeys(self._files, 1))

    def engine_args(self, cache_dir: Path, n_rows: int) -> dict[str, Any]:
        view = view_of_file(self._spec.weights, cache_dir, talker_config(self._spec))
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
        return self._prompt([*self._table.ids(voice), *self._codes[voice]], text)

    # --- voices that a response brings along ---

    def make_voice(self, samples: np.ndarray) -> np.ndarray:
        encoder = self._encoder
        layer = read_part(self._spec.weights, SPEAKER_LAYER)
        row = F.linear(encoder.speaker(samples), layer["weight"].float(), layer["bias"].float())
        of_t3 = torch.cat((row, encoder.codes(samples)))
        return joined_values(of_t3, values_of(*encoder.known(samples)))

    def prompt_in(self, speaker: np.ndarray, text: str) -> PiecePrompt:
        of_t3, _ = split_values(speaker)
        row, codes = np.split(of_t3, [self._spec.width])
        if not (codes.size and 0 <= codes.min() <= codes.max() < N_CODES):
            raise BadInputError(f"another model made the voice: {of_t3.size} values")
        voice_ids = [*self._table.ids_of(row[None]), *codes.astype(int).tolist()]
        return PiecePrompt(self._prompt(voice_ids, text), row[None])

    @cached_property
    def _encoder(self) -> RecordingEncoder:
        return RecordingEncoder(self._spec.path)

    def _prompt(self, voice_ids: list[int], text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(
            as_trained(text), add_special_tokens=False, split_special_tokens=True
        )
        return [
            *voice_ids,
            *(self._spec.n_ids + token for token in tokens),
            BEGIN_ID,
        ]


def as_trained(text: str) -> str:
    """Punctuation as the model knows it, of a text that can be spoken. Source: punc_norm."""
    text = text[:1].upper() + text[1:]
    text = text.replace(":", ",").replace(" ,", ",").rstrip(" ")
    return text if text.endswith((".", "!", "?", "-", ",")) else f"{text}."
