"""The family CSM: a talker that speaks the text of any language model, piece by piece.

Its checkpoint is that of transformers, in which Mimi, which decodes the codes, is contained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import MimiFacts
from sglang_live.models.family import ModelFacts, check_llama, check_number, read_json

ARCHITECTURE = "CsmForConditionalGeneration"
# Numbers of the speakers of a conversation. Without a recording, a voice is made up for each piece.
SPEAKERS = tuple("0123456789")
BEGIN_OF_TEXT, END_OF_TEXT = "<|begin_of_text|>", "<|end_of_text|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CsmSpec:
    """
    Attributes:
        vocab: ids of a codebook: codes, and marks behind them.
        n_codes: of a frame.
        end_id: a mark, which ends a piece in the engine.
        codec: Mimi.
    """

    path: Path
    vocab: int
    text_vocab: int
    n_codes: int
    end_id: int
    codec: MimiFacts

    @staticmethod
    def load(path: str | Path) -> "CsmSpec":
        """Raises BadInputError if the directory is no CSM checkpoint that can be served."""
        path = Path(path)
        try:
            return CsmSpec._of(path, read_json(path / "config.json"))
        except KeyError as error:
            raise BadInputError(f"{path}/config.json lacks {error}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise BadInputError(f"{path}/config.json is malformed: {error}") from error

    @staticmethod
    def _of(path: Path, config: dict[str, Any]) -> "CsmSpec":
        codec = MimiFacts.of(config["codec_config"], f"{path}/config.json")
        depth, n_codes, vocab = (
            config["depth_decoder_config"],
            config["num_codebooks"],
            "vocab_size",
        )
        if not config.get("tie_codebooks_embeddings", True):
            raise BadInputError(f"{path}: a CSM whose codebooks' embeddings differ is not served")
        found = depth["num_codebooks"], codec.n_quantizers, depth[vocab]
        if found != (n_codes, n_codes, config[vocab]):
            raise BadInputError(
                f"{path}: backbone, depth decoder and Mimi have {n_codes}, {found[0]} and "
                f"{found[1]} codebooks, of {config[vocab]} and {depth[vocab]} ids"
            )
        end_id = config["codebook_pad_token_id"]
        if not codec.codebook_size <= end_id < config[vocab]:
            raise BadInputError(
                f"{path}: codebook_pad_token_id is {end_id}: it has to be an id behind the "
                f"{codec.codebook_size} codes"
            )
        return CsmSpec(
            path=path,
            vocab=config[vocab],
            text_vocab=config["text_vocab_size"],
            n_codes=n_codes,
            end_id=end_id,
            codec=codec,
        )


class Csm:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.csm.parts:CsmTalker"
    decoder = "sglang_live.models.csm.decoder:CsmDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in (config.get("architectures") or [])

    def facts(self, path: Path) -> ModelFacts:
        CsmSpec.load(path)
        if not (path / "tokenizer.json").is_file():
            raise BadInputError(f"{path} has no tokenizer.json")
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            voices=SPEAKERS,
            clones_voices=True,
            voices_need_words=True,
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            config = read_json(path / "config.json")
            check_llama(flag, n_ranks, config)


FAMILY = Csm()
