"""MOSS-TTS in the talker stage (models/family.py)."""

import json
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.moss_tts.family import VOICE, MossSpec
from sglang_live.models.piece_talker import FrameTalker
from sglang_live.models.speech_lm.checkpoint import view_of_talker
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.models.voice_files import read_recording, voice_files
from sglang_live.speakable.style import SpeechStyle

TALKER_ARCHITECTURE = "MossBackbone"
PREFIXES = ("language_model.", "emb_ext.", "lm_heads.")
# What the reference's processor writes of a text without any wish.
_WISHES = ("Instruction", "Tokens", "Quality", "Sound Event", "Ambient Sound", "Language")
_BEFORE = "user\n<user_inst>\n- Reference(s):\n"
_BEHIND = "\n" + "".join(f"- {name}:\nNone\n" for name in _WISHES)


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    return view_of_talker(checkpoint, cache, _talker_config, PREFIXES)


def _talker_config(config: dict[str, Any]) -> dict[str, Any]:
    qwen3 = config["language_config"]
    n_ids = (config["n_vq"] + 1) * (config["audio_vocab_size"] + 1)
    return {
        **qwen3,
        "model_type": "qwen3",
        "architectures": [TALKER_ARCHITECTURE],
        "bos_token_id": None,
        "pad_token_id": None,
        "vocab_size": n_ids,
        "text_vocab_size": qwen3["vocab_size"],
        "eos_token_id": n_ids - 1,
        "tie_word_embeddings": False,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        "user_slot": config["audio_user_slot_token_id"],
        "n_books": config["n_vq"],
        "n_codes": config["audio_vocab_size"],
        # The slots with which the reference tells that audio goes on, and that it ends.
        "slots": [
            config["audio_assistant_gen_slot_token_id"],
            config["audio_assistant_delay_slot_token_id"],
        ],
    }


class MossTalker(FrameTalker):
    """The prompt goes up to the mark with which audio starts; the reference draws it among text."""

    external_models = "sglang_live.models.moss_tts.engine"
    chunk_frames = 4
    # 66 ms in a batch by itself (benchmark/speaking_models.py).
    decode_s = 0.15
    style = SpeechStyle()
    # Reference settings (MossTTSDelayModel.generate).
    temperature, repetition_penalty = 1.7, 1.0

    def __init__(self, path: Path, voices: Path | None = None):
        """voices: directory of recordings whose voices it takes on."""
        from transformers import AutoTokenizer

        self._spec = spec = MossSpec.load(path)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self.codes_per_frame, self.end_id = spec.n_books, spec.n_ids - 1
        self.lag_steps = spec.n_books - 1
        self.frame_s = spec.codec.samples_per_frame / spec.codec.sampling_rate
        self._recordings = {} if voices is None else voice_files(voices)
        self.voices = (VOICE, *self._recordings)
        n_rows = {name: self._n_steps(file) for name, file in self._recordings.items()}
        self._table = VoiceTable(spec.n_ids + spec.text_vocab, n_rows)
        ids = spec.text_ids
        tail = [*self._encode("\n"), ids["im_start"], *self._encode("assistant\n")]
        self._tail = [ids["im_end"], *tail, ids["audio_start"]]

    def _n_steps(self, file: Path) -> int:
        """Of a recording. What is no whole frame is left out."""
        codec = self._spec.codec
        n_samples = len(read_recording(file, codec.sampling_rate))
        return n_samples // codec.samples_per_frame + self._spec.n_books - 1

    def engine_args(self, cache_dir: Path, n_rows: int) -> dict[str, Any]:
        return {
            "model_path": str(talker_view(self._spec.path, cache_dir)),
            # The model keeps tensors per request row (speech_lm/talker_state.py).
            "json_model_override_args": json.dumps(
                {
                    "live_rows": n_rows,
                    "live_voice_rows": self._table.n_rows,
                    "live_checkpoint": str(self._spec.path),
                    "live_recordings": [str(file) for file in self._recordings.values()],
                }
            ),
        }

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        marks, first = self._spec.text_ids, self._spec.n_ids
        behind = f"{_BEHIND}- Text:\n{text}\n</user_inst>"
        if voice not in self._table:
            message = self._encode(f"{_BEFORE}None{behind}")
            return [first + token for token in (marks["im_start"], *message, *self._tail)]
        before = [marks["im_start"], *self._encode(f"{_BEFORE}[S1]:\n"), marks["audio_start"]]
        rest = [marks["audio_end"], *self._encode(behind), *self._tail]
        said = self._table.ids(voice)
        return [*(first + token for token in before), *said, *(first + token for token in rest)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids
