"""The family Higgs Audio v2: a talker that speaks the text of any language model, piece by piece.

Its checkpoint is that of transformers. Its codec is another one, expected beside it in the folder
`tokenizer`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import SnacConfig
from sglang_live.models.family import ModelFacts, check_llama, check_number, read_json

ARCHITECTURE, OLD_ARCHITECTURE = "HiggsAudioV2ForConditionalGeneration", "HiggsAudioModel"
CODEC_FOLDER, CODEC_TYPE = "tokenizer", "higgs_audio_v2_tokenizer"
# Without a recording, a voice is made up for each piece.
VOICE = "random"
_RATE_HZ = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HiggsSpec:
    """
    Attributes:
        book_size: ids of a book: codes, and marks behind them.
        begin_id, end_id: marks before and behind the codes of a book.
        codec: as of a SNAC of one rate.
    """

    path: Path
    text_vocab: int
    n_books: int
    book_size: int
    begin_id: int
    end_id: int
    codec: SnacConfig

    @staticmethod
    def load(path: str | Path) -> "HiggsSpec":
        """Raises BadInputError if the directory is no Higgs checkpoint that can be served."""
        path = Path(path)
        config = read_json(path / "config.json")
        if OLD_ARCHITECTURE in (config.get("architectures") or []):
            raise BadInputError(
                f"{path} has Higgs Audio in its first layout: only that of transformers is served"
            )
        try:
            return HiggsSpec._of(path, config)
        except KeyError as error:
            raise BadInputError(f"{path}/config.json lacks {error}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise BadInputError(f"{path}/config.json is malformed: {error}") from error

    @staticmethod
    def _of(path: Path, config: dict[str, Any]) -> "HiggsSpec":
        n_books, size = config["num_codebooks"], config["codebook_size"]
        codec = codec_config(path / CODEC_FOLDER)
        begin_id, end_id = config["audio_stream_bos_id"], config["audio_stream_eos_id"]
        if not codec.codebook_size <= min(begin_id, end_id) or max(begin_id, end_id) >= size:
            raise BadInputError(
                f"{path}: audio_stream_bos_id {begin_id} and audio_stream_eos_id {end_id} have to "
                f"be ids of the {size} in a book, behind the {codec.codebook_size} codes"
            )
        if len(codec.vq_strides) != n_books:
            raise BadInputError(
                f"{path} has {n_books} codebooks, its codec {len(codec.vq_strides)}: it is another"
            )
        return HiggsSpec(
            path=path,
            text_vocab=config["vocab_size"],
            n_books=n_books,
            book_size=size,
            begin_id=begin_id,
            end_id=end_id,
            codec=codec,
        )


def codec_config(path: Path) -> SnacConfig:
    """Raises BadInputError if there is no codec of Higgs Audio v2 that can be decoded."""
    if not path.is_dir():
        raise BadInputError(
            f"{path} is missing: put config.json and model.safetensors of the codec of Higgs Audio "
            "v2, in the layout of transformers, there"
        )
    config = read_json(path / "config.json")
    if config.get("model_type") != CODEC_TYPE:
        raise BadInputError(f"{path} is {config.get('model_type')!r}, not {CODEC_TYPE}")
    acoustic, rate = config["acoustic_model_config"], config["sample_rate"]
    rates, size = tuple(acoustic["upsampling_ratios"]), config["codebook_size"]
    if rate != _RATE_HZ:
        raise BadInputError(f"{path}: a codec of {rate} Hz is not served")
    frame_rate, bits = math.ceil(rate / math.prod(rates)), math.ceil(math.log2(size))
    n_books = int(1000 * config["target_bandwidths"][-1] // (frame_rate * bits))
    return SnacConfig(
        sampling_rate=rate,
        codebook_size=size,
        vq_strides=(1,) * n_books,
        decoder_rates=rates,
        noise=False,
        depthwise=False,
        bounded=False,
    )


class Higgs:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.higgs_v2.parts:HiggsTalker"
    decoder = "sglang_live.models.higgs_v2.decoder:HiggsDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return bool({ARCHITECTURE, OLD_ARCHITECTURE} & set(config.get("architectures") or []))

    def facts(self, path: Path) -> ModelFacts:
        HiggsSpec.load(path)
        if not (path / "tokenizer.json").is_file():
            raise BadInputError(f"{path} has no tokenizer.json")
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            voices=(VOICE,),
            clones_voices=True,
            voices_need_words=True,
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            config = read_json(path / "config.json")
            check_llama(flag, n_ranks, config)


FAMILY = Higgs()
