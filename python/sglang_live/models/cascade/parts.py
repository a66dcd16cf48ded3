"""The parts of a cascade in their stages' processes (models/family.py)."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_live.models.chat_template import TemplatePrompt
from sglang_live.models.family import Family, TalkerModel, family_at, part, read_json
from sglang_live.models.piece_talker import PieceTalker
from sglang_live.models.prompt import Tokenizer
from sglang_live.models.speech import Recogniser, Voice

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


class CascadeThinker:
    """A ThinkerModel: any language model that SGLang serves and that has a chat template."""

    external_models, clip_form = "", None

    def __init__(self, path: Path):
        llm = Path(read_json(path / "config.json")["llm"])
        generation = _optional(llm / "generation_config.json")
        config = read_json(llm / "config.json")
        self.engine_args: Mapping[str, Any] = {"model_path": str(llm), "enable_multimodal": False}
        self._end_ids = _ids(generation.get("eos_token_id", config.get("eos_token_id")))
        does_sample = generation.get("do_sample", bool(generation.get("temperature")))
        found = {n: generation[n] for n in _SAMPLING if generation.get(n) is not None}
        self.sampling: Mapping[str, float] = MappingProxyType(
            found if does_sample else {"temperature": 0.0}
        )

    def prompt(self, tokenizer: Tokenizer) -> TemplatePrompt:
        return TemplatePrompt(tokenizer, self._end_ids)


def load_recogniser(path: Path) -> Recogniser:
    recogniser: Recogniser = _loaded(path, "recogniser")
    return recogniser


def load_voice(path: Path) -> Voice:
    voice: Voice = _loaded(path, "voice")
    return voice


def load_talker(path: Path, **voices: Path) -> TalkerModel | PieceTalker:
    family, checkpoint = _talker(path)
    assert family.talker is not None, "composition looked for one"
    talker: TalkerModel | PieceTalker = part(family.talker)(checkpoint, **voices)
    return talker


class TalkerDecoder:
    """The decoder of the talker's family."""

    @staticmethod
    def from_pretrained(path: str | Path, device: Any, dtype: Any) -> Any:
        family, checkpoint = _talker(Path(path))
        assert family.decoder is not None, "a talker's codes are decoded"
        return part(family.decoder).from_pretrained(checkpoint, device=device, dtype=dtype)


def _talker(path: Path) -> tuple[Family, Path]:
    settings = read_json(path / "config.json")["talker"]
    return family_at(settings["family"]), Path(settings["path"])


def _loaded(path: Path, name: str) -> Any:
    entry = read_json(path / "config.json")[name]
    packages = {key: Path(value) for key, value in entry.get("packages", {}).items()}
    return part(entry["part"])(Path(entry["path"]), **packages, **entry.get("settings", {}))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
