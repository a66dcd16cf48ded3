"""Moshi and PersonaPlex in the talker stage (models/family.py)."""

import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from sglang_live.errors import BadInputError
from sglang_live.models.duplex_talker import DuplexTalker
from sglang_live.models.moshi.family import MOSHI, VOICES, MoshiSpec, voice_names
from sglang_live.models.speech_lm.checkpoint import view_of_talker
from sglang_live.models.speech_lm.voice_table import VoiceTable

TALKER_ARCHITECTURE = "MoshiLM"
PREFIXES = ("transformer.", "out_norm.", "text_", "emb.", "depformer", "linears.")
# Steps that SGLang's context takes beside the frames: voice, role and silences of PersonaPlex.
MOST_PROMPT = 1024
# Frames of silence behind the voice, and behind the role: half a second (PersonaPlex).
SILENT_FRAMES = 6
# Ids that are no words: unknown, begin, end, padding.
_N_SPECIAL = 4


def talker_view(spec: MoshiSpec, cache: Path) -> Path:
    """The view of the checkpoint under `cache`, made when absent. Safe when processes race."""
    config = _talker_config(spec)
    return view_of_talker(spec.path, cache, lambda _: config, PREFIXES)


def _talker_config(spec: MoshiSpec) -> dict[str, Any]:
    sizes = spec.sizes
    return {
        "model_type": "llama",
        "architectures": [TALKER_ARCHITECTURE],
        "vocab_size": sizes["text_card"],
        "hidden_size": sizes["dim"],
        "intermediate_size": gated_width(sizes["dim"], int(sizes["hidden_scale"] * sizes["dim"])),
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_heads"],
        "head_dim": sizes["dim"] // sizes["num_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-8,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(sizes["max_period"])},
        "rope_is_neox_style": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "bfloat16",
        "moshi": {
            "delays": list(sizes["delays"]),
            "card": sizes["card"],
            "n_codes": spec.n_codes,
            "depth_width": sizes["depformer_dim"],
            "depth_inner": gated_width(sizes["depformer_dim"], sizes["depformer_dim_feedforward"]),
            "depth_heads": sizes["depformer_num_heads"],
            "depth_layers": sizes["depformer_num_layers"],
            "has_roles": spec.kind != MOSHI,
        },
    }


def gated_width(width: int, inner: int) -> int:
    """Of each half of a gated layer (moshi: modules/gating.py)."""
    return 21 * width // 8 if inner == 4 * width else 2 * inner // 3


class MoshiTalker(DuplexTalker):
    external_models = "sglang_live.models.moshi.engine"
    frame_s = 0.08
    # Reference setting (moshi: LMGen).
    temperature = 0.7

    def __init__(self, path: Path, voices: Path | None = None):
        self._spec = spec = MoshiSpec.load(path)
        self.n_codes = self.n_heard = spec.n_codes
        self.delays = spec.sizes["delays"][1 : 1 + spec.n_codes]
        self.context_frames = spec.sizes["context"]
        self.voices = voice_names(spec)
        self._pieces = SentencePieceProcessor(str(spec.tokenizer))
        if (n := self._pieces.get_piece_size()) != spec.sizes["text_card"]:
            raise BadInputError(
                f"{spec.tokenizer} has {n} ids, the language model {spec.sizes['text_card']}"
            )
        self._has_roles = spec.kind != MOSHI
        n_rows: dict[str, int] = {}
        if self._has_roles:
            from sglang_live.models.moshi.voices import n_voice_rows

            n_rows = {name: n_voice_rows(self._voice_file(name)) for name in self.voices}
        text = spec.sizes["text_card"]
        self._initial, self._role = text, text + 1
        self._table = VoiceTable(self._role + text, n_rows)

    def _voice_file(self, name: str) -> Path:
        return self._spec.path / VOICES / f"{name}.pt"

    def engine_args(self, cache_dir: Path, n_rows: int, n_frames: int) -> dict[str, Any]:
        voices = [str(self._voice_file(name)) for name in self.voices if self._has_roles]
        return {
            "model_path": str(talker_view(self._spec, cache_dir)),
            "json_model_override_args": json.dumps(
                {
                    "live_rows": n_rows,
                    "live_frames": n_frames,
                    "live_voices": voices,
                    "live_voice_rows": self._table.n_rows,
                    # Positions are the model's own affair: this bounds what is in KV at once.
                    "max_position_embeddings": MOST_PROMPT + n_frames,
                }
            ),
        }

    def prompt(self, voice: str, role: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        if not self._has_roles:
            if role:
                raise BadInputError("this model takes no instructions: PersonaPlex does")
            return [self._initial]
        silence = [self._role + self._silent_text] * SILENT_FRAMES
        # The voice's rows hold the first silent frame: Mimi's codes behind it are delayed.
        ids = [*self._table.ids(voice), *silence[1:]]
        if role:
            ids += [self._role + token for token in self._pieces.encode(_in_tags(role))]
            ids += silence
        if len(ids) > MOST_PROMPT:
            raise BadInputError(f"voice and role are {len(ids)} frames, the limit is {MOST_PROMPT}")
        return ids

    @property
    def _silent_text(self) -> int:
        return _N_SPECIAL - 1

    def text(self, token: int) -> str:
        if token < _N_SPECIAL:
            return ""
        piece: str = self._pieces.id_to_piece(token)
        return piece.replace("\u2581", " ")


def _in_tags(role: str) -> str:
    """As the model was trained (NVIDIA/personaplex: server.py)."""
    role = role.strip()
    tagged = role.startswith("<system>") and role.endswith("<system>")
    return role if tagged else f"<system> {role} <system>"
