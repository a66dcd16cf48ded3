"""The family MOSS-TTS (delay): a talker that speaks the text of any language model, piece by piece.

Its codec, MOSS-Audio-Tokenizer, is a checkpoint of its own, expected beside it in the folder
`tokenizer`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.family import ModelFacts, check_llama, check_number, read_json

MODEL_TYPE, CODEC_TYPE, CODEC_FOLDER = "moss_tts_delay", "moss-audio-tokenizer", "tokenizer"
# Without a recording, a voice is made up for each piece.
VOICE = "random"
_BY_ANGLE = ("rlfq", "random_prefix_rlfq")
_STREAMED = {
    "causal": True,
    "norm": "layer_norm",
    "positional_embedding": "rope",
    "gating": "none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecStage:
    """Transformer layers, and the patches that are made of each of their columns; in an encoder,
    of which their columns are made.

    Attributes:
        name: of the layers in the checkpoint.
        n_window: columns that a column sees.
        n_patches: columns of the other stage, or samples, of each.
    """

    name: str
    width_in: int
    width: int
    width_out: int
    feed_forward: int
    n_heads: int
    n_layers: int
    n_window: int
    rope_theta: float
    n_patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """Of a MOSS-Audio-Tokenizer whose decoder can be streamed.

    Attributes:
        projects: whether codes have another width than what the books' sum is of, and that another
            one than the first stage.
        has_inner_width: whether what is quantised has another width than the encoder's last stage.
        encoder: its stages; none: it is not there.
    """

    sampling_rate: int
    samples_per_frame: int
    n_quantizers: int
    codebook_size: int
    projects: tuple[bool, bool]
    has_inner_width: bool
    stages: tuple[CodecStage, ...]
    encoder: tuple[CodecStage, ...]

    @staticmethod
    def load(path: Path) -> "CodecSpec":
        """Raises BadInputError if there is none that can be decoded as a stream."""
        if not path.is_dir():
            raise BadInputError(
                f"{path} is missing: put config.json and the weights of MOSS-Audio-Tokenizer there"
            )
        config = read_json(path / "config.json")
        if config.get("model_type") != CODEC_TYPE:
            raise BadInputError(f"{path} is {config.get('model_type')!r}, not {CODEC_TYPE}")
        try:
            return CodecSpec._of(path, config)
        except KeyError as error:
            raise BadInputError(f"{path}/config.json lacks {error}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise BadInputError(f"{path}/config.json is malformed: {error}") from error

    @staticmethod
    def _of(path: Path, config: dict[str, Any]) -> "CodecSpec":
        rate = config.get("sampling_rate", config.get("sample_rate"))
        n_samples, books = config["downsample_rate"], config["quantizer_kwargs"]
        if rate != 24_000 or config.get("number_channels", 1) != 1:
            raise BadInputError(f"{path}: only the codec of 24 kHz in one channel is served")
        window_s = config["causal_transformer_context_duration"]
        stages, frame_rate = [], rate / n_samples
        layers = list(enumerate(config["decoder_kwargs"]))
        for (n, stage), (_, patch) in zip(layers[::2], layers[1::2], strict=True):
            n_window = int(frame_rate * window_s)
            stages.append(_stage(path, f"decoder.{n}.", stage, patch, n_window))
            frame_rate *= patch["patch_size"]
        encoder, frame_rate = [], float(rate)
        layers = list(enumerate(config.get("encoder_kwargs") or ()))
        for (_, patch), (n, stage) in zip(layers[::2], layers[1::2], strict=True):
            frame_rate /= patch["patch_size"]
            n_window = int(frame_rate * window_s)
            encoder.append(_stage(path, f"encoder.{n}.", stage, patch, n_window))
        width = books["rvq_dim"]
        return CodecSpec(
            sampling_rate=rate,
            samples_per_frame=n_samples,
            n_quantizers=books["num_quantizers"],
            codebook_size=books["codebook_size"],
            projects=(books["codebook_dim"] != width, books["output_dim"] != width),
            has_inner_width=books.get("input_dim", books["output_dim"]) != width,
            stages=tuple(stages),
            # Others are quantised by distances instead of angles.
            encoder=tuple(encoder) if books.get("quantizer_type") in _BY_ANGLE else (),
        )


def _stage(
    path: Path, name: str, stage: Mapping[str, Any], patch: Mapping[str, Any], n_window: int
) -> CodecStage:
    """Raises BadInputError if it cannot be streamed."""
    found = stage["module_type"], patch["module_type"]
    if found != ("Transformer", "PatchedPretransform"):
        raise BadInputError(f"{path}: a {name[:7]} with layers {found} is not streamed")
    for key, value in _STREAMED.items():
        if stage[key] != value:
            raise BadInputError(f"{path}: a {name[:7]} with {key} {stage[key]} is not served")
    return CodecStage(
        name=name,
        width_in=stage["input_dimension"],
        width=stage["d_model"],
        width_out=stage["output_dimension"],
        feed_forward=stage["dim_feedforward"],
        n_heads=stage["num_heads"],
        n_layers=stage["num_layers"],
        n_window=n_window,
        rope_theta=stage["max_period"],
        n_patches=patch["patch_size"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MossSpec:
    """
    Attributes:
        n_codes: of a book; its next id is the mark before and behind them.
        text_ids: by the names in config.json, without _token_id.
    """

    path: Path
    text_vocab: int
    n_books: int
    n_codes: int
    text_ids: Mapping[str, int]
    codec: CodecSpec

    @property
    def n_ids(self) -> int:
        """Of all books, and of the channel behind them that tells the end."""
        return (self.n_books + 1) * (self.n_codes + 1)

    @staticmethod
    def load(path: str | Path) -> "MossSpec":
        """Raises BadInputError if the directory is no MOSS-TTS that can be served."""
        path = Path(path)
        config = read_json(path / "config.json")
        try:
            n_books, n_codes = config["n_vq"], config["audio_vocab_size"]
            if config["audio_pad_code"] != n_codes:
                raise BadInputError(
                    f"{path}: audio_pad_code is {config['audio_pad_code']}, it has to be the id "
                    f"behind the {n_codes} codes"
                )
            spec = MossSpec(
                path=path,
                text_vocab=config["language_config"]["vocab_size"],
                n_books=n_books,
                n_codes=n_codes,
                text_ids={name: config[f"{name}_token_id"] for name in _TEXT_IDS},
                codec=CodecSpec.load(path / CODEC_FOLDER),
            )
        except KeyError as error:
            raise BadInputError(f"{path}/config.json lacks {error}") from error
        except TypeError as error:
            raise BadInputError(f"{path}/config.json is malformed: {error}") from error
        found = spec.codec.n_quantizers, spec.codec.codebook_size
        if found[0] < n_books or found[1] != n_codes:
            raise BadInputError(
                f"{path} has {n_books} books of {n_codes} codes, its codec {found[0]} of {found[1]}"
            )
        return spec


_TEXT_IDS = (
    "im_start",
    "im_end",
    "audio_start",
    "audio_end",
    "audio_user_slot",
    "audio_assistant_gen_slot",
    "audio_assistant_delay_slot",
)


class Moss:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.moss_tts.parts:MossTalker"
    decoder = "sglang_live.models.moss_tts.decoder:MossDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == MODEL_TYPE

    def facts(self, path: Path) -> ModelFacts:
        spec = MossSpec.load(path)
        if not (path / "tokenizer.json").is_file():
            raise BadInputError(f"{path} has no tokenizer.json")
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            voices=(VOICE,),
            clones_voices=bool(spec.codec.encoder),
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            config = read_json(path / "config.json")["language_config"]
            check_llama(flag, n_ranks, config)


FAMILY = Moss()
