"""The family of cascades. A cascade's checkpoint is a directory with a config.json
(models/composition.py)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.family import ModelFacts, check_divided, check_number, kv_values, read_json

ARCHITECTURE = "Cascade"
SPOKEN = "sglang_live.models.cascade.spoken"
# Facts of its talker, if it has one, that are its own.
OF_TALKER = (
    *("clones_voices", "voices_need_words", "voice_rate_hz", "made_voices"),
    *("recording_stages", "least_recorded_s", "most_recorded_s"),
)
_DIVIDED = ("num_attention_heads", "intermediate_size")


class Cascade:
    thinker = "sglang_live.models.cascade.parts:CascadeThinker"
    recogniser = "sglang_live.models.cascade.parts:load_recogniser"
    talker: str | None = None
    decoder: str | None = None
    voice: str | None = "sglang_live.models.cascade.parts:load_voice"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("architectures") == [ARCHITECTURE]

    def facts(self, path: Path) -> ModelFacts:
        cascade = read_json(path / "config.json")
        llm = Path(cascade["llm"])
        config = llm_config(llm)
        is_spoken = "talker" in cascade
        return ModelFacts(
            path=path,
            family=SPOKEN if is_spoken else __name__,
            weights=llm,
            stages=("thinker", "talker", "vocoder") if is_spoken else ("thinker", "vocoder"),
            talker_reads_text=is_spoken,
            voices=tuple(cascade["voices"]),
            **{name: cascade["talker"][name] for name in OF_TALKER if is_spoken},
            hears=cascade["recogniser"].get("hears", ""),
            recogniser_gives=tuple(cascade["recogniser"].get("gives", ())),
            vocab_size=config["vocab_size"],
            context_tokens=config["max_position_embeddings"],
            kv_values=kv_values(config),
            follows_instructions="gives_up" not in config,
            cpu_weights=cascade.get("cpu_weights", ""),
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage != "thinker":
            return
        config = llm_config(Path(read_json(path / "config.json")["llm"]))
        sizes = {name: config[name] for name in _DIVIDED if name in config}
        n_heads = config.get("num_attention_heads", n_ranks)
        check_divided(flag, n_ranks, sizes, config.get("num_key_value_heads") or n_heads)


def llm_config(path: Path) -> dict[str, Any]:
    """The config of a language model, of its text part if it has others.

    Raises:
        BadInputError: it cannot be the language model of a cascade.
    """
    whole = read_json(path / "config.json")
    config: dict[str, Any] = whole.get("text_config") or whole
    if whole.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        raise BadInputError(f"{path}: an encoder-decoder model cannot hold a conversation")
    for name in ("vocab_size", "max_position_embeddings"):
        if type(config.get(name)) is not int:
            raise BadInputError(f"{path}/config.json lacks {name}")
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise BadInputError(f"{path} has no tokenizer")
    if not has_template(path):
        raise BadInputError(
            f"{path} has no chat template: only models that were trained for chat can be used"
        )
    return config


def has_template(path: Path) -> bool:
    if (path / "chat_template.jinja").exists() or (path / "chat_template.json").exists():
        return True
    settings = path / "tokenizer_config.json"
    return settings.exists() and bool(read_json(settings).get("chat_template"))


FAMILY = Cascade()
