"""The family Moshi: a language model and a codec in one call, without turns.

Its checkpoint is that of Kyutai's package: config.json, the model and Mimi as safetensors with the
names of that package, a SentencePiece model. PersonaPlex has voices and a role in words besides.
Source: moshi 0.2.13 (models/loaders.py), NVIDIA/personaplex (models/loaders.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import MimiFacts
from sglang_live.models.family import ModelFacts, check_number, read_json

MOSHI, PERSONAPLEX = "moshi", "personaplex"
ONE_VOICE = "moshi"
VOICES = "voices"  # PersonaPlex: the directory of voices.tgz
# Sizes of the published models: a config that lacks one has this value.
_SIZES: Mapping[str, Any] = {
    "dim": 4096,
    "text_card": 32_000,
    "n_q": 16,
    "dep_q": 8,
    "card": 2048,
    "num_heads": 32,
    "num_layers": 32,
    "hidden_scale": 4.125,
    "context": 3000,
    "max_period": 10_000,
    "depformer_dim": 1024,
    "depformer_dim_feedforward": 4224,
    "depformer_num_heads": 16,
    "depformer_num_layers": 6,
    "delays": [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1],
}
# What the model class computes; others are refused.
_COMPUTED: Mapping[str, Any] = {
    "causal": True,
    "layer_scale": None,
    "gating": "silu",
    "norm": "rms_norm_f32",
    "norm_emb": False,
    "bias_proj": False,
    "positional_embedding": "rope",
    "text_card_out": None,
    "demux_second_text_stream": False,
    "depformer_layer_scale": None,
    "depformer_multi_linear": True,
    "depformer_gating": "silu",
    "depformer_pos_emb": "none",
    "depformer_norm": None,
    "depformer_low_rank_embeddings": None,
    "depformer_weights_per_step": True,
    "depformer_weights_per_step_schedule": None,
    "fuser": None,
    "lora_name": None,
}
# Of Mimi as config.json of transformers has it, by section and name in Kyutai's.
_MIMI: Mapping[str, tuple[str, str, Any]] = {
    "hidden_size": ("seanet", "dimension", 512),
    "num_filters": ("seanet", "n_filters", 64),
    "num_attention_heads": ("transformer", "num_heads", 8),
    "num_key_value_heads": ("transformer", "num_heads", 8),
    "num_hidden_layers": ("transformer", "num_layers", 8),
    "intermediate_size": ("transformer", "dim_feedforward", 2048),
    "sliding_window": ("transformer", "context", 250),
    "codebook_size": ("quantizer", "bins", 2048),
    "codebook_dim": ("quantizer", "dimension", 256),
    "vector_quantization_hidden_dimension": ("quantizer", "dimension", 256),
    "upsample_groups": ("seanet", "dimension", 512),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoshiSpec:
    """
    Attributes:
        kind: MOSHI or PERSONAPLEX.
        sizes: of the language model, by the names of config.json.
        codec_config: of Mimi, as config.json of transformers has it.
        weights, codec, tokenizer: files.
    """

    path: Path
    kind: str
    sizes: Mapping[str, Any]
    codec_config: Mapping[str, Any]
    weights: Path
    codec: Path
    tokenizer: Path

    @property
    def n_codes(self) -> int:
        """Of a frame of its own, and of one of the user."""
        n: int = self.sizes["n_q"] // 2
        return n

    @staticmethod
    def load(path: str | Path) -> "MoshiSpec":
        """Raises BadInputError if the directory is no Moshi checkpoint that can be served."""
        path = Path(path)
        config = read_json(path / "config.json")
        try:
            return MoshiSpec._of(path, config)
        except (TypeError, AttributeError, ValueError, KeyError) as error:
            raise BadInputError(f"{path}/config.json is malformed: {error}") from error

    @staticmethod
    def _of(path: Path, config: dict[str, Any]) -> "MoshiSpec":
        if config.get("architectures"):
            raise BadInputError(
                f"{path} has transformers' layout of Moshi, which cannot hear a user who still "
                "speaks: get the one of Kyutai's package, as kyutai/moshiko-pytorch-bf16"
            )
        for name, value in _COMPUTED.items():
            if config.get(name, value) != value:
                raise BadInputError(f"{path}: a Moshi with {name} {config[name]!r} is not served")
        sizes = {name: config.get(name, value) for name, value in _SIZES.items()}
        _check_streams(path, sizes)
        codec_config = _codec_config(path, config, sizes["n_q"] // 2)
        facts = MimiFacts.of(codec_config, f"{path}: its Mimi")
        if facts.codebook_size != sizes["card"]:
            raise BadInputError(
                f"{path}: Mimi's codebooks have {facts.codebook_size} codes, those of the language "
                f"model {sizes['card']}"
            )
        named = ("moshi_name", "model.safetensors", "the weights of its language model")
        return MoshiSpec(
            path=path,
            kind=config["model_type"],
            sizes=sizes,
            codec_config=codec_config,
            weights=_file(path, config, *named),
            codec=_file(
                path,
                config,
                "mimi_name",
                "tokenizer-e351c8d8-checkpoint125.safetensors",
                "the weights of Mimi, its codec",
            ),
            tokenizer=_file(
                path, config, "tokenizer_name", "tokenizer_spm_32k_3.model", "its tokenizer"
            ),
        )


def _check_streams(path: Path, sizes: Mapping[str, Any]) -> None:
    n_q, delays = sizes["n_q"], sizes["delays"]
    if n_q % 2 or sizes["dep_q"] not in (n_q // 2, n_q):
        raise BadInputError(
            f"{path}: n_q is {n_q} and dep_q {sizes['dep_q']}: a Moshi that hears the user has as "
            "many codebooks for the user as of its own"
        )
    if len(delays) != n_q + 1 or delays[0] != 0 or set(delays) != {0, 1}:
        raise BadInputError(
            f"{path}: delays are {delays}: {n_q + 1} are served, each 0 or 1, that of the text 0"
        )
    if sizes["text_card"] > 1 << 15 or sizes["card"] > 1 << 15:
        raise BadInputError(f"{path}: text_card and card are at most 32768")


def _codec_config(path: Path, config: Mapping[str, Any], n_codes: int) -> dict[str, Any]:
    name = config.get("mimi_config_name")
    given = read_json(path / name) if name else {}
    found = {key: given.get(part, {}).get(own, v) for key, (part, own, v) in _MIMI.items()}
    found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return {"model_type": "mimi", **found, "num_quantizers": n_codes}


def _file(path: Path, config: Mapping[str, Any], key: str, usual: str, what: str) -> Path:
    name = config.get(key, usual)
    if Path(name).name != name:
        raise BadInputError(f"{path}/config.json: {key} is {name!r}: not a file beside it")
    if not (path / name).is_file():
        raise BadInputError(f"{path} lacks {name}, {what}")
    return path / name


class Moshi:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.moshi.parts:MoshiTalker"
    decoder = "sglang_live.models.moshi.codec:MoshiCodec"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in (MOSHI, PERSONAPLEX)

    def facts(self, path: Path) -> ModelFacts:
        spec = MoshiSpec.load(path)
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            voices=voice_names(spec),
            duplex_s=0.08,
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker" and n_ranks > 1:
            raise BadInputError(f"{flag}: this model's talker runs on one rank")


def voice_names(spec: MoshiSpec) -> tuple[str, ...]:
    """Raises BadInputError if a PersonaPlex has none."""
    if spec.kind == MOSHI:
        return (ONE_VOICE,)
    names = tuple(sorted(file.stem for file in (spec.path / VOICES).glob("*.pt")))
    if not names:
        raise BadInputError(f"{spec.path} has no {VOICES}/*.pt: unpack voices.tgz in it")
    return names


FAMILY = Moshi()
