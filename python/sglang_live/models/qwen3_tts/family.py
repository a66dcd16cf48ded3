"""The family Qwen3-TTS: a talker that speaks the text of any language model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_live.models.divided import check_divided, check_number
from sglang_live.models.family import ModelFacts, read_json
from sglang_live.models.qwen3_tts.spec import ARCHITECTURE, Qwen3TTSSpec

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
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            talker = read_json(path / "config.json")["talker_config"]
            sizes = {name: talker[name] for name in _DIVIDED}
            check_divided(flag, n_ranks, sizes, talker["num_key_value_heads"])


FAMILY = Qwen3TTS()
