"""The family Chatterbox: a talker that speaks English text of any language model.

Its checkpoint is that of ResembleAI/chatterbox, which has no config.json: the sizes are those of
the weights. Voices are files that Chatterbox itself writes (Conditionals.save): `conds.pt`, and
those of the folder `voices`; or recordings.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ
from sglang_live.models.family import ModelFacts, check_divided, check_number
from sglang_live.models.voice_files import voice_files

WEIGHTS, DECODER_WEIGHTS, TOKENIZER = "t3_cfg.safetensors", "s3gen.safetensors", "tokenizer.json"
# Turbo's decoder, whose flow has two steps.
MEAN_WEIGHTS = "s3gen_meanflow.safetensors"
# Of the encoder of speakers; those of the others are beside the decoder's.
SPEAKER_WEIGHTS = "ve.safetensors"
# Of recordings: how much is shown of it. Source: prepare_conditionals.
EMOTION = 0.5
# The voice of conds.pt.
VOICE, VOICE_FILE, VOICES_FOLDER = "default", "conds.pt", "voices"
_WRITTEN = ".pt"
MADE_VOICES = f"{VOICES_FOLDER}/NAME.pt, which Chatterbox writes (prepare_conditionals, conds.save)"
_RECORDINGS_NEED = f"recordings need {SPEAKER_WEIGHTS}, and the encoders within the decoder's file"
# Fixed in the reference (T3Config, LLAMA_CONFIGS).
HEAD_DIM, N_CODES, BEGIN_ID, END_ID = 64, 6561, 6561, 6562
TEXT_BEGIN_ID, TEXT_END_ID = 255, 0
FRAME_S = 0.04
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Prefixes of their weights in the decoder's file.
CODES_PART, SPEAKER_PART = "tokenizer.", "speaker_encoder."
_LAYER = re.compile(r"tfmr\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class T3Spec:
    """
    Attributes:
        n_ids: codes, and marks behind them.
        n_text_places, n_speech_places: that have a learned embedding.
        n_voice_rows: of a voice: the speaker, what a perceiver makes of codes, and the emotion.
    """

    path: Path
    dtype: str
    width: int
    inner: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_ids: int
    n_text_ids: int
    n_text_places: int
    n_speech_places: int
    n_voice_rows: int

    @staticmethod
    def load(path: str | Path) -> "T3Spec":
        """Raises BadInputError if the directory has no T3 that can be served."""
        path = Path(path)
        file = path / WEIGHTS
        try:
            with safe_open(file, "np") as tensors:
                names = tensors.keys()
                dtype = tensors.get_slice("speech_head.weight").get_dtype()

                def size(name: str, axis: int = 0) -> int:
                    return int(tensors.get_slice(f"{name}.weight").get_shape()[axis])

                attention = "tfmr.layers.0.self_attn"
                queries = tensors.get_slice("cond_enc.perceiver.pre_attention_query").get_shape()
                return T3Spec(
                    path=path,
                    dtype=DTYPES[dtype],
                    width=size("speech_emb", 1),
                    inner=size("tfmr.layers.0.mlp.gate_proj"),
                    n_layers=len({found[1] for name in names if (found := _LAYER.match(name))}),
                    n_heads=size(f"{attention}.q_proj") // HEAD_DIM,
                    n_kv_heads=size(f"{attention}.k_proj") // HEAD_DIM,
                    n_ids=size("speech_emb"),
                    n_text_ids=size("text_emb"),
                    n_text_places=size("text_pos_emb.emb"),
                    n_speech_places=size("speech_pos_emb.emb"),
                    n_voice_rows=queries[1] + 2,
                )
        except OSError as error:
            raise BadInputError(f"cannot read {file}: {error}") from error
        except (SafetensorError, KeyError, IndexError) as error:
            raise BadInputError(f"{file} is no T3 of Chatterbox: {error}") from error


def voice_paths(path: Path, recordings: Path | None = None) -> dict[str, Path]:
    """Files of voices by name, those of recordings behind the others; the first is the default.

    recordings: their directory (voice_files.py).
    Raises:
        BadInputError: there is none, or two have one name.
    """
    found = _own_voices(path) | ({} if recordings is None else voice_files(recordings))
    if not found:
        raise BadInputError(f"{path} has no voice: {VOICE_FILE} is missing, and {MADE_VOICES}")
    return found


def is_recording(file: Path) -> bool:
    """Whether a voice's file is none that Chatterbox has written."""
    return file.suffix != _WRITTEN


def _own_voices(path: Path) -> dict[str, Path]:
    """Raises BadInputError: two have one name."""
    found = {VOICE: path / VOICE_FILE} if (path / VOICE_FILE).is_file() else {}
    for file in sorted((path / VOICES_FOLDER).glob(f"*{_WRITTEN}")):
        if file.stem in found:
            raise BadInputError(f"{file} has the name of another voice")
        found[file.stem] = file
    return found


def voice_facts(path: Path, weights: str) -> dict[str, Any]:
    """Of ModelFacts, what tells of voices.

    weights: name of the decoder's file.
    Raises:
        BadInputError: the file is broken, or there is no voice, and no encoder for recordings.
    """
    try:
        with safe_open(path / weights, "np") as tensors:
            names = tensors.keys()
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"cannot read {path / weights}: {error}") from error
    clones_voices = (path / SPEAKER_WEIGHTS).is_file() and all(
        f"{part}weight" in names
        for part in (f"{CODES_PART}encoder.conv1.", f"{SPEAKER_PART}head.conv1.")
    )
    return {
        "voices": tuple(_own_voices(path) if clones_voices else voice_paths(path)),
        "clones_voices": clones_voices,
        "voice_rate_hz": RECORDING_RATE_HZ if clones_voices else 0,
        "recording_stages": ("talker", "vocoder"),
        "made_voices": f"{MADE_VOICES}; {_RECORDINGS_NEED}",
    }


class Chatterbox:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.chatterbox.parts:ChatterboxTalker"
    decoder = "sglang_live.models.chatterbox.decoder:ChatterboxDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return WEIGHTS in config.get("files", ())

    def facts(self, path: Path) -> ModelFacts:
        T3Spec.load(path)
        for name in (TOKENIZER, DECODER_WEIGHTS):
            if not (path / name).is_file():
                raise BadInputError(f"{path / name} is missing: it belongs to Chatterbox")
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            **voice_facts(path, DECODER_WEIGHTS),
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            spec = T3Spec.load(path)
            # The heads of both prompts of a pair are divided, not copied.
            sizes = {
                "num_attention_heads": spec.n_heads,
                "num_key_value_heads": spec.n_kv_heads,
                "intermediate_size": spec.inner,
            }
            check_divided(flag, n_ranks, sizes, spec.n_kv_heads)


FAMILY = Chatterbox()
