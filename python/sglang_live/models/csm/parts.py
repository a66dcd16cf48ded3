"""CSM in the talker stage (models/family.py)."""

import json
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.csm.family import BEGIN_OF_TEXT, END_OF_TEXT, SPEAKERS, CsmSpec
from sglang_live.models.piece_talker import FrameTalker
from sglang_live.models.speech_lm.checkpoint import view_of_talker
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.models.voice_files import read_recording, voice_files, words_of
from sglang_live.speakable.style import SpeechStyle

TALKER_ARCHITECTURE = "CsmBackbone"
PREFIXES = ("backbone_model.", "depth_decoder.", "embed_text_tokens.", "lm_head.")
_NOT_LLAMA = ("depth_decoder_config", "codec_config", "transformers_weights")


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    return view_of_talker(checkpoint, cache, _talker_config, PREFIXES)


def _talker_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: value for key, value in config.items() if key not in _NOT_LLAMA},
        "model_type": "llama",
        "architectures": [TALKER_ARCHITECTURE],
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": config["codebook_pad_token_id"],
        "tie_word_embeddings": False,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        "depth": config["depth_decoder_config"],
        "n_codes": config["num_codebooks"],
        "codebook_size": config["codec_config"]["codebook_size"],
    }


class CsmTalker(FrameTalker):
    """Every piece is what a speaker says next, after what the voice's recording says, if any."""

    external_models = "sglang_live.models.csm.engine"
    frame_s, chunk_frames = 0.08, 4
    style = SpeechStyle()
    # Reference settings (generation_config.json of sesame/csm-1b).
    temperature, repetition_penalty = 0.9, 1.0

    def __init__(self, path: Path, voices: Path | None = None):
        """voices: directory of recordings whose voices it takes on, each with its words."""
        from transformers import AutoTokenizer

        self._spec = spec = CsmSpec.load(path)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        marks = [BEGIN_OF_TEXT, END_OF_TEXT]
        self._begin, self._end = self._tokenizer.convert_tokens_to_ids(marks)
        if None in (self._begin, self._end):
            raise BadInputError(f"{path}: its tokenizer lacks {' or '.join(marks)}")
        self.codes_per_frame, self.end_id = spec.n_codes, spec.end_id
        self._recordings = {} if voices is None else voice_files(voices)
        self._words = {name: words_of(file) for name, file in self._recordings.items()}
        # Behind the last frame of a recording is one that ends it.
        n_rows = {name: self._n_frames(file) + 1 for name, file in self._recordings.items()}
        self._table = VoiceTable(spec.vocab + spec.text_vocab, n_rows)
        self.voices = (*SPEAKERS, *self._recordings)

    def _n_frames(self, file: Path) -> int:
        codec = self._spec.codec
        samples = read_recording(file, codec.sampling_rate)
        return -(-len(samples) // codec.samples_per_frame)  # the last one is filled with silence

    def engine_args(self, cache_dir: Path, n_rows: int) -> dict[str, Any]:
        return {
            "model_path": str(talker_view(self._spec.path, cache_dir)),
            # The model keeps tensors per request row (speech_lm/talker_state.py).
            "json_model_override_args": json.dumps(
                {
                    "live_rows": n_rows,
                    "live_checkpoint": str(self._spec.path),
                    "live_recordings": [str(file) for file in self._recordings.values()],
                    "live_voice_rows": self._table.n_rows,
                }
            ),
        }

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice in self._table:
            speaker = SPEAKERS[0]
            said = [*self._text(speaker, self._words[voice]), *self._table.ids(voice)]
        elif voice in SPEAKERS:
            speaker, said = voice, []
        else:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        return [*said, *self._text(speaker, text)]

    def _text(self, speaker: str, text: str) -> list[int]:
        ids = self._tokenizer.encode(
            f"[{speaker}]{text}", add_special_tokens=False, split_special_tokens=True
        )
        return [self._spec.vocab + token for token in (self._begin, *ids, self._end)]
