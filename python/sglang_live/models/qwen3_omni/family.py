"""The family Qwen3-Omni: one checkpoint that hears, thinks and speaks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_live.models.family import ModelFacts
from sglang_live.models.qwen3_omni.ranks import check_ranks
from sglang_live.models.qwen3_omni.spec import ARCHITECTURE, Qwen3OmniSpec


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
            vocab_size=spec.thinker_vocab,
            context_tokens=spec.thinker_context,
            good_tokens=spec.good_tokens,
            kv_values=spec.kv_values,
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_ranks(path, stage, flag, n_ranks)


FAMILY = Qwen3Omni()
