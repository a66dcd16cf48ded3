"""The family Orpheus: a talker that speaks the text of any language model, piece by piece.

Its checkpoint is a plain Llama; it is known by the size of its vocabulary, and by the names of its
codes in the tokenizer. SNAC, which decodes the codes, is expected beside it, in the folder `snac`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.snac_config import SnacConfig
from sglang_live.models.divided import check_divided, check_number
from sglang_live.models.family import ModelFacts, read_json
from sglang_live.models.orpheus.vocabulary import (
    CODEBOOK_SIZE,
    CODES_PER_FRAME,
    END_OF_CODES_ID,
    FIRST_CODE_ID,
)

SNAC_FOLDER = "snac"
# Of the published English model. Others name theirs as "voices" in config.json.
VOICES = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
# Rows without a token that a vocabulary may have at its end, to be divisible.
_PADDING = 1024
_CODE_NAME = "<custom_token_{}>"
_FIRST_CODE = 10  # before it are the marks
_DIVIDED = ("num_attention_heads", "intermediate_size")


class Orpheus:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.orpheus.parts:OrpheusTalker"
    decoder = "sglang_live.models.orpheus.parts:OrpheusDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        size = config.get("vocab_size")
        is_llama = "LlamaForCausalLM" in (config.get("architectures") or [])
        return is_llama and type(size) is int and 0 <= size - END_OF_CODES_ID < _PADDING

    def facts(self, path: Path) -> ModelFacts:
        config = read_json(path / "config.json")
        _check_tokenizer(path)
        _check_snac(path / SNAC_FOLDER)
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            voices=voices_of(config),
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            config = read_json(path / "config.json")
            sizes = {name: config[name] for name in _DIVIDED}
            check_divided(flag, n_ranks, sizes, config["num_key_value_heads"])


def voices_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Raises BadInputError if they are no names."""
    voices = config.get("voices", VOICES)
    if not voices or not all(isinstance(voice, str) and voice for voice in voices):
        raise BadInputError(f"config.json: voices must be a list of names, got {voices!r}")
    return tuple(voices)


def _check_tokenizer(path: Path) -> None:
    added = {
        token["content"]: token["id"]
        for token in read_json(path / "tokenizer.json").get("added_tokens", [])
    }
    n_codes = CODEBOOK_SIZE * CODES_PER_FRAME
    for n, token_id in ((0, FIRST_CODE_ID), (n_codes - 1, END_OF_CODES_ID - 1)):
        name = _CODE_NAME.format(_FIRST_CODE + n)
        if added.get(name) != token_id:
            raise BadInputError(
                f"{path}: its tokenizer has {name} at {added.get(name)}, Orpheus has it at "
                f"{token_id}: it is another Llama, or lacks its tokenizer"
            )


def _check_snac(path: Path) -> None:
    if not path.is_dir():
        raise BadInputError(
            f"{path} is missing: put config.json and pytorch_model.bin of hubertsiuzdak/snac_24khz "
            "there, which turns Orpheus' codes into sound"
        )
    snac = SnacConfig.load(path)
    found = snac.sampling_rate, snac.codebook_size, snac.vq_strides
    if found != (24_000, CODEBOOK_SIZE, (4, 2, 1)):
        raise BadInputError(
            f"{path}: Orpheus needs the SNAC of 24 kHz, this has sampling_rate, codebook_size and "
            f"vq_strides {found}"
        )


FAMILY = Orpheus()
