"""Gives the engines and the vocoder of a server random weights, made on their devices.

For a model of folder.py. SGLang's load format `dummy` loads no files; what it fills in is replaced.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from lab.attachment import around
from lab.random_model.folder import Facts
from sglang_live.attachment import ATTACH_ENV
from sglang_live.stages.spec import StageSpec

ENVIRONMENT = {ATTACH_ENV: "lab.random_model.attach:attach"}
ENGINE_ARGS = {"load_format": "dummy"}
SERVER_ARGS = tuple(f"--{engine}.load-format=dummy" for engine in ("thinker", "talker"))


def attach(place: str) -> None:
    spec = StageSpec.from_env()
    facts = Facts.of(Path(spec.model_path))
    if place == "sglang":
        from sglang.srt.model_loader import loader

        def initialise(_dummy: Callable[..., None], model: nn.Module) -> None:
            initialise_engine(model, facts)

        around(loader, "initialize_dummy_weights", initialise)
    elif spec.stage == "vocoder":
        from lab.random_model.vocoder import load_random
        from sglang_live.models.qwen3_omni import code2wav

        around(code2wav, "load_code2wav", load_random)


def initialise_engine(model: Any, facts: Facts) -> None:
    """In the place of SGLang's initialize_dummy_weights, in the engine of thinker or talker."""
    from lab.random_model.weights import fill, prepare_talker, speak_words_only
    from sglang_live.models.speech_lm.engine.talker import SpeechLM

    fill(model, facts.seed)
    if isinstance(model, SpeechLM):
        prepare_talker(model, facts)
    else:
        speak_words_only(model.thinker.lm_head.weight, facts)
