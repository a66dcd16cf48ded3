"""Zonos in the talker stage (models/family.py)."""

import json
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.piece_talker import FrameTalker
from sglang_live.models.piper import EspeakReader
from sglang_live.models.speech_lm.checkpoint import view_of_talker
from sglang_live.models.speech_lm.voice_table import VoiceTable
from sglang_live.models.voice_files import voice_files
from sglang_live.models.zonos.family import (
    N_BOOKS,
    N_CODES,
    PHONEMES,
    SPEAKER,
    VOICE,
    ZonosSpec,
    frame_s,
)
from sglang_live.speakable.style import SpeechStyle

TALKER_ARCHITECTURE = "ZonosBackbone"
PREFIXES = ("backbone.", "embeddings.", "heads.", "prefix_conditioner.")
_LANGUAGE = "en-us"
# Ids of phonemes are by their places here. Source: zonos/conditioning.py.
_PAD, _UNKNOWN, _BEGIN, _END = range(4)
_SIGNS = (
    ';:,.!?¡¿—…"«»“”() *~-/\\&'
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    "ɑɐɒæɓʙβɔɕçɗɖðʤəɘɚɛɜɝɞɟʄɡɠɢʛɦɧħɥʜɨɪʝɭɬɫɮʟɱɯɰŋɳɲɴøɵɸθœɶʘɹɺɾɻʀʁɽʂʃʈʧʉʊʋⱱʌɣɤʍχʎʏʑʐʒʔʡʕʢǀǁǂǃ"
    "ˈˌːˑʼʴʰʱʲʷˠˤ˞↓↑→↗↘'̩'ᵻ"
)
N_PHONEMES = len(_SIGNS) + 4
_ID_OF = {sign: 4 + n for n, sign in enumerate(_SIGNS)}
# A row of the table behind those of the conditions: the frame of marks before the first one.
_BEGIN_ROW = "begin"
# Behind it are those of the voices, whose names may be any.
_VOICE_ROW = "voice {}"


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    return view_of_talker(checkpoint, cache, _talker_config, PREFIXES)


def _talker_config(config: dict[str, Any]) -> dict[str, Any]:
    backbone = config["backbone"]
    heads, n_kv = (backbone["attn_cfg"][name] for name in ("num_heads", "num_heads_kv"))
    n_ids = N_BOOKS * (N_CODES + 2)
    return {
        "model_type": "llama",
        "architectures": [TALKER_ARCHITECTURE],
        "vocab_size": n_ids,
        "text_vocab_size": N_PHONEMES,
        "eos_token_id": n_ids - 1,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "hidden_size": backbone["d_model"],
        "intermediate_size": backbone["attn_mlp_d_intermediate"],
        "num_hidden_layers": backbone["n_layer"],
        # Both prompts of a pair have the KV of one request (speech_lm/engine/pair.py).
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": 2 * n_kv,
        "head_dim": backbone["d_model"] // heads,
        "layer_norm_eps": backbone["norm_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "max_position_embeddings": 16_384,
        "dtype": config.get("dtype") or "bfloat16",
        "prefix_conditioner": config["prefix_conditioner"],
    }


class ZonosTalker(FrameTalker):
    external_models = "sglang_live.models.zonos.engine"
    chunk_frames = 16
    style = SpeechStyle()
    # Reference settings (sample_from_logits).
    temperature, repetition_penalty = 1.0, 3.0
    codes_per_frame, lag_steps = N_BOOKS, N_BOOKS - 1

    def __init__(self, path: Path, voices: Path | None = None):
        """voices: directory of recordings whose speakers' voices it takes on."""
        self._spec = spec = ZonosSpec.load(path)
        self.end_id = spec.n_ids - 1
        self.frame_s = frame_s(spec.codec)
        self.ahead_frames = spec.codec.ahead_frames
        self._reader = EspeakReader(_LANGUAGE, _ID_OF)
        names = [one["name"] for one in spec.conditioners if one["name"] != PHONEMES]
        self._recordings = {} if voices is None else voice_files(voices)
        self.voices = (VOICE, *self._recordings)
        of_voices = [_VOICE_ROW.format(name) for name in self._recordings]
        rows = dict.fromkeys([*names, _BEGIN_ROW, *of_voices], 1)
        self._table = VoiceTable(spec.n_ids + N_PHONEMES, rows)

    def engine_args(self, cache_dir: Path, n_rows: int) -> dict[str, Any]:
        marks = {"live_begin_id": self._spec.begin_id, "live_end_id": self._spec.end_id}
        return {
            "model_path": str(talker_view(self._spec.path, cache_dir)),
            # The model keeps tensors per request row (speech_lm/talker_state.py).
            "json_model_override_args": json.dumps(
                {
                    "live_rows": n_rows,
                    "live_voice_rows": self._table.n_rows,
                    "live_checkpoint": str(self._spec.path),
                    "live_recordings": [str(file) for file in self._recordings.values()],
                    **marks,
                }
            ),
        }

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        _, sentences = self._reader.read(text)
        signs = "".join(phoneme.sign for sentence in sentences for phoneme in sentence).strip()
        phonemes = [_BEGIN, *(_ID_OF[sign] for sign in signs), _END]
        ids: list[int] = []
        for one in self._spec.conditioners:
            if one["name"] == PHONEMES:
                ids += [self._spec.n_ids + phoneme for phoneme in phonemes]
            elif one["name"] == SPEAKER and voice in self._recordings:
                ids += self._table.ids(_VOICE_ROW.format(voice))
            else:
                ids += self._table.ids(one["name"])
        return [*ids, *self._table.ids(_BEGIN_ROW)]
