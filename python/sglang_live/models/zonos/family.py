"""The family Zonos v0.1 (transformer): a talker that speaks English text of any language model.

Its codec, DAC of 44.1 kHz in the layout of transformers, is expected beside it in the folder `dac`,
and, for voices of recordings, the files of Zyphra/Zonos-v0.1-speaker-embedding in `speaker`.
Its phonemes come from the program espeak-ng.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import SnacConfig
from sglang_live.models.family import ModelFacts, check_divided, check_number, read_json
from sglang_live.models.piper import ESPEAK

CODEC_FOLDER, SPEAKER_FOLDER = "dac", "speaker"
SPEAKER_FILES = "ResNet293_SimAM_ASP_base.pt", "ResNet293_SimAM_ASP_base_LDA-128.pt"
# Without a speaker's embedding, a voice is made up for each piece.
VOICE = "random"
N_BOOKS, N_CODES = 9, 1024  # fixed in the reference
PHONEMES, SPEAKER = "espeak", "speaker"
# What a prompt says beside its phonemes, by the name of a conditioner; what is not here is left to
# the model. Source: make_cond_dict (zonos/conditioning.py), for English.
CONDITIONS: Mapping[str, Sequence[float]] = MappingProxyType(
    {
        "emotion": (0.3077, 0.0256, 0.0256, 0.0256, 0.0256, 0.0256, 0.2564, 0.3077),
        "fmax": (22_050.0,),
        "pitch_std": (20.0,),
        "speaking_rate": (15.0,),
        "language_id": (24,),
        "ctc_loss": (0.0,),
        "speaker_noised": (0,),
    }
)
_TYPES = ("PassthroughConditioner", "FourierConditioner", "IntegerConditioner")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZonosSpec:
    """
    Attributes:
        conditioners: of the prompt in its order, as config.json has them.
        begin_id, end_id: marks before and behind the codes of a book.
    """

    path: Path
    backbone: Mapping[str, Any]
    conditioners: tuple[Mapping[str, Any], ...]
    begin_id: int
    end_id: int
    codec: SnacConfig

    @property
    def n_ids(self) -> int:
        """Of all books."""
        return N_BOOKS * (N_CODES + 2)

    @staticmethod
    def load(path: str | Path) -> "ZonosSpec":
        """Raises BadInputError if the directory is no Zonos that can be served."""
        path = Path(path)
        config = read_json(path / "config.json")
        try:
            return ZonosSpec._of(path, config)
        except KeyError as error:
            raise BadInputError(f"{path}/config.json lacks {error}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise BadInputError(f"{path}/config.json is malformed: {error}") from error

    @staticmethod
    def _of(path: Path, config: dict[str, Any]) -> "ZonosSpec":
        backbone, prefix = config["backbone"], config["prefix_conditioner"]
        if backbone.get("ssm_cfg") or backbone.get("rms_norm"):
            raise BadInputError(f"{path}: only the transformer of Zonos is served, not the hybrid")
        marks = config.get("masked_token_id", N_CODES + 1), config.get("eos_token_id", N_CODES)
        if sorted(marks) != [N_CODES, N_CODES + 1]:
            raise BadInputError(
                f"{path}: its marks are {marks}, not the ids behind {N_CODES} codes"
            )
        for one in prefix["conditioners"]:
            is_told = one["name"] in CONDITIONS or one.get("uncond_type") == "learned"
            if one["name"] != PHONEMES and (one["type"] not in _TYPES or not is_told):
                raise BadInputError(f"{path}: its condition {one['name']} is not served")
        if prefix["projection"] not in ("none", "linear"):
            raise BadInputError(f"{path}: a projection {prefix['projection']} is not served")
        return ZonosSpec(
            path=path,
            backbone=backbone,
            conditioners=tuple(prefix["conditioners"]),
            begin_id=marks[0],
            end_id=marks[1],
            codec=codec_config(path / CODEC_FOLDER),
        )


def codec_config(path: Path) -> SnacConfig:
    """As of a SNAC of one rate. Raises BadInputError if there is no DAC of 44.1 kHz."""
    if not path.is_dir():
        raise BadInputError(
            f"{path} is missing: put config.json and model.safetensors of descript/dac_44khz there"
        )
    config = read_json(path / "config.json")
    found = tuple(
        config.get(name) for name in ("model_type", "sampling_rate", "n_codebooks", "codebook_size")
    )
    if found != ("dac", 44_100, N_BOOKS, N_CODES):
        raise BadInputError(f"{path} is {found}: Zonos needs the DAC of 44.1 kHz with nine books")
    return SnacConfig(
        sampling_rate=config["sampling_rate"],
        codebook_size=config["codebook_size"],
        vq_strides=(1,) * N_BOOKS,
        decoder_rates=tuple(config["upsampling_ratios"]),
        noise=False,
        depthwise=False,
    )


def frame_s(codec: SnacConfig) -> float:
    return math.prod(codec.decoder_rates) / codec.sampling_rate


def _takes_speakers(spec: ZonosSpec) -> bool:
    """Raises BadInputError if its speaker encoder lacks a file."""
    folder = spec.path / SPEAKER_FOLDER
    if not folder.is_dir() or all(one["name"] != SPEAKER for one in spec.conditioners):
        return False
    for name in SPEAKER_FILES:
        if not (folder / name).is_file():
            raise BadInputError(f"{folder / name} is missing: it encodes voices of recordings")
    return True


class Zonos:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.zonos.parts:ZonosTalker"
    decoder = "sglang_live.models.zonos.decoder:ZonosDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        # It names no architecture.
        return {"backbone", "prefix_conditioner"} <= config.keys()

    def facts(self, path: Path) -> ModelFacts:
        spec = ZonosSpec.load(path)
        if shutil.which(ESPEAK) is None:
            raise BadInputError(
                f"{path} is Zonos, whose phonemes come from the program {ESPEAK}, which is not "
                f"installed (apt install {ESPEAK}; its licence is GPL-3.0)"
            )
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            voices=(VOICE,),
            clones_voices=_takes_speakers(spec),
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            config = read_json(path / "config.json")["backbone"]
            heads, n_kv = (config["attn_cfg"][name] for name in ("num_heads", "num_heads_kv"))
            inner = config["attn_mlp_d_intermediate"]
            check_divided(flag, n_ranks, {"num_heads": heads, "num_heads_kv": n_kv}, n_kv)
            check_divided(flag, n_ranks, {"attn_mlp_d_intermediate": inner}, n_kv)


FAMILY = Zonos()
