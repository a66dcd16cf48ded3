"""The family Qwen3-Omni: one checkpoint that hears, thinks and speaks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.family import ModelFacts, check_divided, check_number, kv_values, read_json
from sglang_live.sound.clip_form import ClipForm
from sglang_live.speakable.style import SpeechStyle

ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
FRAME_RATE_HZ = 12.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3OmniSpec:
    """Ids and sizes that stages and orchestrator must agree on.

    Ids of text tokens are in the thinker's vocabulary, codec ids in the talker's.

    Attributes:
        good_tokens: length of a conversation that it is good for, by the demo model's own key of
            config.json; 0: not told.
        sees, watches: see ModelFacts.
        gives_up: how its responses begin to what it does not understand, by another such key; "":
            it calls functions (models/stand_ins.py).
        kv_values: see ModelFacts.
        sampling: the thinker's defaults (generation_config.json), by SGLang's names.
        script_style: of a talker that reads English words alone, which `live_speaks` of its
            configuration says.
    """

    path: Path
    thinker_vocab: int
    thinker_context: int
    good_tokens: int
    gives_up: str
    kv_values: int
    thinker_hidden: int
    accept_hidden_layer: int
    codec_vocab: int
    codebook_size: int
    num_code_groups: int
    im_start_id: int
    im_end_id: int
    audio_pad_id: int
    image_pad_id: int
    video_pad_id: int
    sees: bool
    watches: bool
    system_id: int
    user_id: int
    assistant_id: int
    tts_bos_id: int
    tts_eos_id: int
    tts_pad_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_id: int
    speakers: MappingProxyType[str, int]
    end_of_turn_ids: tuple[int, ...]
    sampling: MappingProxyType[str, float]
    clip_form: ClipForm | None
    hears_one_utterance: bool
    script_style: SpeechStyle | None

    @staticmethod
    def load(path: str | Path) -> "Qwen3OmniSpec":
        """Raises BadInputError if the directory is not a Qwen3-Omni checkpoint with a talker."""
        path = Path(path)
        try:
            return Qwen3OmniSpec._of(path, read_json(path / "config.json"))
        except KeyError as error:
            raise BadInputError(f"{path}/config.json lacks {error}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise BadInputError(f"{path}/config.json is malformed: {error}") from error

    @staticmethod
    def _of(path: Path, config: dict[str, Any]) -> "Qwen3OmniSpec":
        architectures = config.get("architectures") or []
        if ARCHITECTURE not in architectures:
            raise BadInputError(f"{path}: architectures {architectures}, expected {ARCHITECTURE}")
        if not config.get("enable_audio_output", True):
            raise BadInputError(f"{path}: checkpoint has no talker (enable_audio_output is false)")
        thinker, talker = config["thinker_config"], config["talker_config"]
        generation = (
            read_json(path / "generation_config.json")
            if (path / "generation_config.json").exists()
            else {}
        )
        end = generation.get("eos_token_id", config["im_end_token_id"])
        return Qwen3OmniSpec(
            path=path,
            thinker_vocab=thinker["text_config"]["vocab_size"],
            thinker_context=thinker["text_config"]["max_position_embeddings"],
            good_tokens=config.get("good_tokens", 0),
            gives_up=config.get("gives_up", ""),
            kv_values=kv_values(thinker["text_config"]),
            thinker_hidden=thinker["text_config"]["hidden_size"],
            accept_hidden_layer=talker["accept_hidden_layer"],
            codec_vocab=talker["text_config"]["vocab_size"],
            codebook_size=config["code2wav_config"]["codebook_size"],
            num_code_groups=talker["num_code_groups"],
            im_start_id=config["im_start_token_id"],
            im_end_id=config["im_end_token_id"],
            audio_pad_id=thinker["audio_token_id"],
            image_pad_id=thinker["image_token_id"],
            video_pad_id=thinker["video_token_id"],
            sees=_sees(path, thinker, "image_processor"),
            watches=_sees(path, thinker, "video_processor"),
            system_id=config["system_token_id"],
            user_id=config["user_token_id"],
            assistant_id=config["assistant_token_id"],
            tts_bos_id=config["tts_bos_token_id"],
            tts_eos_id=config["tts_eos_token_id"],
            tts_pad_id=config["tts_pad_token_id"],
            codec_nothink_id=talker["codec_nothink_id"],
            codec_think_bos_id=talker["codec_think_bos_id"],
            codec_think_eos_id=talker["codec_think_eos_id"],
            codec_pad_id=talker["codec_pad_id"],
            codec_bos_id=talker["codec_bos_id"],
            codec_eos_id=talker["codec_eos_token_id"],
            speakers=MappingProxyType({k.lower(): v for k, v in talker["speaker_id"].items()}),
            end_of_turn_ids=tuple(end) if isinstance(end, list) else (end,),
            sampling=MappingProxyType(_sampling(generation)),
            clip_form=ClipForm.of(thinker),
            hears_one_utterance=bool(thinker.get("live_one_utterance")),
            script_style=_script_style(talker),
        )

    @property
    def placeholders(self) -> frozenset[int]:
        """Tokens of the thinker that stand for audio, pictures and videos."""
        return frozenset((self.audio_pad_id, self.image_pad_id, self.video_pad_id))

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self.speakers)


# The first is of newer checkpoints; the other has all media in one.
_PROCESSORS = (("processor_config.json", True), ("preprocessor_config.json", False))


def _sees(path: Path, thinker: dict[str, Any], processor: str) -> bool:
    """Whether there is a vision tower that this processor of the checkpoint cuts for.

    Every configuration that transformers writes has a tower, that of the demo model too.
    """
    tower = thinker.get("vision_config")
    if not tower:
        return False
    for name, has_parts in _PROCESSORS:
        if (path / name).exists():
            found = read_json(path / name)
            patch = (found.get(processor) or {} if has_parts else found).get("patch_size")
            return patch is not None and patch == tower.get("patch_size", 16)
    return False


def _script_style(talker: dict[str, Any]) -> SpeechStyle | None:
    match talker.get("live_speaks"):
        case None:
            return None
        case "english words":
            return SpeechStyle(folds=True)
        case other:
            raise ValueError(f"live_speaks is {other!r}")


def _sampling(generation: dict[str, Any]) -> dict[str, float]:
    if not generation.get("do_sample", True):
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "min_new_tokens")
    return {name: generation[name] for name in names if generation.get(name) is not None}


_DECODER = ("num_attention_heads", "moe_intermediate_size")


def check_ranks(path: Path, stage: str, flag: str, n_ranks: int) -> None:
    """Check that a stage's model can be divided among tensor-parallel ranks.

    Raises:
        BadInputError: names the flag, and a size that cannot be divided.
    """
    check_number(flag, n_ranks)
    if n_ranks == 1 or stage == "vocoder":
        return
    config = json.loads((path / "config.json").read_text("utf-8"))[f"{stage}_config"]
    text = config["text_config"]
    sizes = {name: text[name] for name in _DECODER}
    if shared := text.get("shared_expert_intermediate_size"):
        sizes["shared_expert_intermediate_size"] = shared
    sizes |= _encoders(config)
    check_divided(flag, n_ranks, sizes, text["num_key_value_heads"])


def _encoders(config: Mapping[str, Any]) -> dict[str, int]:
    """Attention heads of the thinker's encoders."""
    names = {"audio_config": "encoder_attention_heads", "vision_config": "num_heads"}
    return {
        f"{part}.{name}": config[part][name] for part, name in names.items() if config.get(part)
    }


class Qwen3Omni:
    thinker = "sglang_live.models.qwen3_omni.parts:OmniThinker"
    recogniser = voice = None
    talker = "sglang_live.models.qwen3_omni.parts:OmniTalker"
    decoder = "sglang_live.models.qwen3_omni.code2wav:StreamingCode2Wav"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in (config.get("architectures") or [])

    def facts(self, path: Path) -> ModelFacts:
        spec = Qwen3OmniSpec.load(path)
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            voices=spec.voices,
            hears_one_utterance=spec.hears_one_utterance,
            sees=spec.sees,
            watches=spec.watches,
            vocab_size=spec.thinker_vocab,
            context_tokens=spec.thinker_context,
            good_tokens=spec.good_tokens,
            follows_instructions=not spec.gives_up,
            kv_values=spec.kv_values,
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_ranks(path, stage, flag, n_ranks)


FAMILY = Qwen3Omni()
