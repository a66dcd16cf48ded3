"""The family Orpheus: a talker that speaks the text of any language model, piece by piece.

Its checkpoint is a plain Llama; it is known by the size of its vocabulary, and by the names of its
codes in the tokenizer. SNAC, which decodes the codes, is expected beside it, in the folder `snac`.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import SnacConfig
from sglang_live.models.family import ModelFacts, check_llama, check_number, read_json
from sglang_live.models.piece_talker import StockTalker, WrongCodeError
from sglang_live.speakable.style import SpeechStyle

# Behind Llama 3's own tokens come ten marks, then 4096 codes for each of the seven places of a
# frame, in SNAC's order. Source: orpheus_tts, engine_class.py and decoder.py (Apache-2.0).
TEXT_END_ID = 128009
SPEECH_BEGIN_ID, SPEECH_END_ID = 128257, 128258
HUMAN_BEGIN_ID, HUMAN_END_ID, AI_BEGIN_ID = 128259, 128260, 128261
FIRST_CODE_ID = 128266
CODEBOOK_SIZE, CODES_PER_FRAME = 4096, 7
END_OF_CODES_ID = FIRST_CODE_ID + CODEBOOK_SIZE * CODES_PER_FRAME
# The model ends at the first; the reference also ends at the second.
STOP_IDS = (SPEECH_END_ID, 49158)


class CodeReader:
    """A FrameReader. A frame that is not complete at the end is left out, as by the reference."""

    def __init__(self) -> None:
        self._codes: list[int] = []

    def add(self, ids: list[int]) -> list[list[int]]:
        frames = []
        for token in ids:
            first = FIRST_CODE_ID + CODEBOOK_SIZE * len(self._codes)
            if not first <= token < first + CODEBOOK_SIZE:
                raise WrongCodeError(
                    f"the talker wrote id {token} where code {len(self._codes)} of a frame is due, "
                    f"which is one of {first} to {first + CODEBOOK_SIZE - 1}"
                )
            self._codes.append(token - first)
            if len(self._codes) == CODES_PER_FRAME:
                frames.append(self._codes)
                self._codes = []
        return frames


SNAC_FOLDER = "snac"
# Of the published English model. Others name theirs as "voices" in config.json.
VOICES = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
# Rows without a token that a vocabulary may have at its end, to be divisible.
_PADDING = 1024
_CODE_NAME = "<custom_token_{}>"
_FIRST_CODE = 10  # before it are the marks
_FRAME_S = 2048 / 24_000  # SNAC's


class OrpheusTalker(StockTalker):
    codes_per_frame = steps_per_frame = CODES_PER_FRAME
    frame_s, chunk_frames = _FRAME_S, 4
    stop_ids = STOP_IDS
    style = SpeechStyle()
    # Reference settings (orpheus_tts, OrpheusModel.generate_tokens_sync).
    sampling: Mapping[str, Any] = MappingProxyType(
        {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3}
    )

    def __init__(self, path: Path):
        from transformers import AutoTokenizer

        self._path = path
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self.voices = voices_of(read_json(path / "config.json"))
        self.ahead_frames = SnacConfig.load(path / SNAC_FOLDER).ahead_frames

    def engine_args(self, cache_dir: Path) -> dict[str, Any]:
        return {"model_path": str(self._path)}

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        # With the tokenizer's own begin of text, as in training.
        ids = self._tokenizer.encode(f"{voice}: {text}", split_special_tokens=True)
        tail = (TEXT_END_ID, HUMAN_END_ID, AI_BEGIN_ID, SPEECH_BEGIN_ID)
        return [HUMAN_BEGIN_ID, *ids, *tail]

    def frames(self) -> CodeReader:
        return CodeReader()


class OrpheusDecoder:
    """SNAC, from the folder beside the checkpoint."""

    @staticmethod
    def from_pretrained(path: str | Path, device: Any, dtype: Any) -> Any:
        from sglang_live.models.codecs.snac import SnacDecoder

        return SnacDecoder.from_pretrained(Path(path) / SNAC_FOLDER, device, dtype)


class Orpheus:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.orpheus.family:OrpheusTalker"
    decoder = "sglang_live.models.orpheus.family:OrpheusDecoder"

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
            check_llama(flag, n_ranks, config)


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
