"""The family GLM-4-Voice: one language model that hears speech as ids, and writes 13 ids of text
and 26 of speech in turns.

Its three checkpoints lie in one directory: the language model's files, and folders with those of
the speech tokenizer and of the decoder under their published names.
Source: GLM-4-Voice, arXiv:2412.02612.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.family import ModelFacts, check_divided, check_number, read_json

MODEL_TYPE = "chatglm"
TOKENIZER, DECODER = "glm-4-voice-tokenizer", "glm-4-voice-decoder"
DECODER_FILES = DECODER_CONFIG, FLOW_FILE, HIFT_FILE = "config.yaml", "flow.pt", "hift.pt"
# Codes of a stream's first block, how many more the next ones have, and of the longest: those of
# the published demo.
FIRST_BLOCK, BLOCK_STEP, LONGEST_BLOCK = 25, 50, 200
VOICE = "glm"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
AUDIO = "<|begin_of_audio|>", "<|end_of_audio|>"
# What the published tokenizer writes before every text.
BEGIN = "[gMASK]", "<sop>"
_PARTS = "sglang_live.models.glm4_voice.parts"


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmVoiceSpec:
    """
    special: ids of control tokens and codes, by name.
    first_code, n_codes: ids of the codes, in a row.
    """

    path: Path
    config: Mapping[str, Any]
    special: Mapping[str, int]
    first_code: int
    n_codes: int

    @classmethod
    def load(cls, path: Path) -> "GlmVoiceSpec":
        """Raises BadInputError: it is another model of this architecture, or a file is missing."""
        settings = read_json(path / "tokenizer_config.json")
        added = settings.get("added_tokens_decoder", {})
        special = {token["content"]: int(number) for number, token in added.items()}
        names = (SYSTEM, USER, ASSISTANT, *AUDIO, *BEGIN, code_name(0))
        if missing := [name for name in names if name not in special]:
            raise BadInputError(
                f"{path}: the tokenizer lacks {', '.join(missing)}: this is not GLM-4-Voice. A "
                "language model that neither hears nor speaks needs --recogniser and --voice-model "
                "(docs/cascade.md)"
            )
        if not (path / TOKENIZER / "config.json").is_file():
            raise BadInputError(f"{path} lacks the folder {TOKENIZER} with the speech tokenizer")
        for name in DECODER_FILES:
            if not (path / DECODER / name).is_file():
                raise BadInputError(f"{path} lacks the file {DECODER}/{name}")
        first, n = special[code_name(0)], 1
        while special.get(code_name(n)) == first + n:
            n += 1
        config = read_json(path / "config.json")
        return cls(path=path, config=config, special=special, first_code=first, n_codes=n)


def code_name(code: int) -> str:
    return f"<|audio_{code}|>"


class GlmVoice:
    thinker = f"{_PARTS}:GlmThinker"
    decoder = "sglang_live.models.glm4_voice.decoder:GlmDecoder"
    recogniser = talker = voice = None

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == MODEL_TYPE

    def facts(self, path: Path) -> ModelFacts:
        config = GlmVoiceSpec.load(path).config
        kv = 2 * config["num_layers"] * config["multi_query_group_num"] * config["kv_channels"]
        return ModelFacts(
            path=path,
            weights=path,
            family=__name__,
            stages=("thinker", "vocoder"),
            own_voice=True,
            voices=(VOICE,),
            vocab_size=config["padded_vocab_size"],
            context_tokens=config["seq_length"],
            kv_values=kv,
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "thinker":
            config = read_json(path / "config.json")
            sizes = {name: config[name] for name in ("num_attention_heads", "ffn_hidden_size")}
            check_divided(flag, n_ranks, sizes, config["multi_query_group_num"])


FAMILY = GlmVoice()
