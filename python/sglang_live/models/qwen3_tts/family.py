"""The family Qwen3-TTS: a talker that speaks the text of any language model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.family import ModelFacts, check_divided, check_number, read_json

ARCHITECTURE = "Qwen3TTSForConditionalGeneration"
# Of the type "base", the checkpoint has the weights for it.
SPEAKER_ENCODER = "speaker_encoder_config"
CODEC = "speech_tokenizer"
# Of the speaker encoder.
VOICE_RATE_HZ = 24_000
_CODEC_TYPE = "qwen3_tts_tokenizer_12hz"
# By language: the first words of the Unicode names of its letters (speakable/style.py).
_SCRIPTS = {
    "chinese": ("CJK",),
    "japanese": ("CJK", "HIRAGANA", "KATAKANA"),
    "korean": ("HANGUL",),
    "russian": ("CYRILLIC",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3TTSSpec:
    """
    Attributes:
        codec_vocab: ids of the talker: codes, and controls behind them.
        speakers: by lower-case name, codec ids of language, or none, and speaker.
        no_language: codec ids in the place of a language: the text tells it.
        clones_voices: whether it has a speaker encoder.
        scripts: of the languages that the checkpoint names.
        im_start_id, tts_eos_id: text ids.
    """

    path: Path
    codec_vocab: int
    text_vocab: int
    speakers: MappingProxyType[str, tuple[int, ...]]
    no_language: tuple[int, ...]
    clones_voices: bool
    scripts: frozenset[str]
    im_start_id: int
    tts_eos_id: int

    @staticmethod
    def load(path: str | Path) -> "Qwen3TTSSpec":
        """Raises BadInputError if the directory is no Qwen3-TTS checkpoint that has voices, or a
        speaker encoder."""
        path = Path(path)
        try:
            return Qwen3TTSSpec._of(path, read_json(path / "config.json"))
        except KeyError as error:
            raise BadInputError(f"{path}/config.json lacks {error}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise BadInputError(f"{path}/config.json is malformed: {error}") from error

    @staticmethod
    def _of(path: Path, config: dict[str, Any]) -> "Qwen3TTSSpec":
        codec, talker = config["tokenizer_type"], config["talker_config"]
        if codec != _CODEC_TYPE:
            raise BadInputError(f"{path}: its codec is {codec}; only {_CODEC_TYPE} can be decoded")
        clones_voices = config.get("tts_model_type") == "base"
        if clones_voices and config[SPEAKER_ENCODER]["enc_dim"] != talker["hidden_size"]:
            raise BadInputError(
                f"{path}: its speaker encoder's enc_dim is {config[SPEAKER_ENCODER]['enc_dim']}, "
                f"not the talker's hidden_size, {talker['hidden_size']}"
            )
        if not talker.get("spk_id") and not clones_voices:
            raise BadInputError(
                f"{path}: this checkpoint ({config.get('tts_model_type')}) has no voices of its "
                "own; use one whose name ends in CustomVoice, or in Base with recordings (--voices)"
            )
        for file in ("config.json", "model.safetensors"):
            if not (path / CODEC / file).is_file():
                raise BadInputError(f"{path / CODEC / file} is missing: it decodes the speech")
        languages = talker.get("codec_language_id") or {}
        scripts = {script for name in languages for script in _SCRIPTS.get(name, ())}
        return Qwen3TTSSpec(
            path=path,
            codec_vocab=talker["vocab_size"],
            text_vocab=talker["text_vocab_size"],
            speakers=MappingProxyType(
                {name.lower(): _codes(talker, languages, name) for name in talker["spk_id"] or ()}
            ),
            no_language=_no_language(talker),
            clones_voices=clones_voices,
            scripts=frozenset(scripts | {"LATIN"}),
            im_start_id=config["im_start_token_id"],
            tts_eos_id=config["tts_eos_token_id"],
        )

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self.speakers)


def _no_language(talker: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id")
    return tuple(talker[name] for name in names)


def _codes(
    talker: Mapping[str, Any], languages: Mapping[str, int], speaker: str
) -> tuple[int, ...]:
    """A speaker of a dialect speaks it; others speak the language of the text."""
    begin, end = talker["codec_think_bos_id"], talker["codec_think_eos_id"]
    if dialect := (talker.get("spk_is_dialect") or {}).get(speaker):
        language: tuple[int, ...] = (talker["codec_think_id"], begin, languages[dialect], end)
    else:
        language = _no_language(talker)
    return (*language, talker["spk_id"][speaker])


_DIVIDED = ("num_attention_heads", "intermediate_size")


class Qwen3TTS:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.qwen3_tts.parts:TTSTalker"
    decoder = "sglang_live.models.qwen3_tts.decoder:StreamingCodecDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in (config.get("architectures") or [])

    def facts(self, path: Path) -> ModelFacts:
        spec = Qwen3TTSSpec.load(path)
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            voices=spec.voices,
            clones_voices=spec.clones_voices,
            voice_rate_hz=VOICE_RATE_HZ if spec.clones_voices else 0,
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            talker = read_json(path / "config.json")["talker_config"]
            sizes = {name: talker[name] for name in _DIVIDED}
            check_divided(flag, n_ranks, sizes, talker["num_key_value_heads"])


FAMILY = Qwen3TTS()
