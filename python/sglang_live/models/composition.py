"""Composes the checkpoint of a cascade: a directory with a config.json that names its parts.

Weights of built-in recognisers and voices are fetched at first use (models/packages.py). Without
torch: the server composes before it starts a stage.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.cascade.family import ARCHITECTURE, OF_TALKER, llm_config
from sglang_live.models.checkpoint_files import check_checkpoint, is_checkpoint
from sglang_live.models.family import ModelFacts, checkpoint_config, claiming_family
from sglang_live.models.packages import SMOLLM2, Package, fetch, licence_line, packages_directory
from sglang_live.models.smollm2.location import GGUF
from sglang_live.models.speech import SpeechModel
from sglang_live.models.speech_kinds import find_recogniser, find_voice


def find_talker(given: str, *families: str) -> ModelFacts | None:
    """
    Args:
        given: as voice: a directory, or the name of another kind of voice.
        families: modules of model families outside this package.
    Returns:
        None: it is no checkpoint of a model family.
    Raises:
        BadInputError: its family does not speak the text of other models, or a file of it is
            missing or broken.
    """
    path = Path(os.path.expanduser(given))
    if not is_checkpoint(path):
        return None
    family = claiming_family(checkpoint_config(path), *families)
    if family is None:
        return None
    facts = family.facts(path.resolve())
    if not facts.talker_reads_text or facts.has_thinker:
        raise BadInputError(f"{path} speaks for its own thinker alone: give it as --model-path")
    check_checkpoint(facts.weights)
    return facts


Report = Callable[[str], None]

# Value of --model-path for the cascade of the demo.
CASCADE = "cascade"


def compose(
    llm: Path,
    recogniser: str,
    voice: str,
    cache: Path,
    report: Report,
    *,
    language: str = "",
    cpu_weights: str = "",
    families: tuple[str, ...] = (),
) -> Path:
    """Return the directory of a cascade's checkpoint, under `cache`.

    Args:
        llm: directory of a language model with a chat template.
        recogniser, voice: names or paths, see models/speech_kinds.py; a voice may be the directory
            of a speaking language model, too.
        report: receives lines about downloads.
        cpu_weights: see ModelFacts.
        language: that users speak; "": the recogniser detects it, or knows only one.
        families: modules of model families outside this package.
    Raises:
        BadInputError: the language model cannot be used, or there is no such part.
        LiveError: a package cannot be fetched.
    """
    llm_config(llm)
    hears, talker, speaks = find_parts(recogniser, voice, language, families)
    # A recogniser of one language takes no setting.
    spoken = {"language": language} if len(hears.offers) > 1 else {}
    heard = {
        "settings": spoken,
        "hears": hears.offers[0] if len(hears.offers) == 1 else language,
        "gives": list(hears.gives),
    }
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "llm": str(llm.resolve()),
        "recogniser": _entry(hears, cache, report) | heard,
        "cpu_weights": cpu_weights,
    }
    if talker is not None:
        config["talker"] = {
            "family": talker.family,
            "path": str(talker.path),
            **{name: getattr(talker, name) for name in OF_TALKER},
        }
        config["voices"] = list(talker.voices)
    if speaks is not None:
        config["voice"] = _entry(speaks, cache, report)
        config["voices"] = list(speaks.offers)
    text = json.dumps(config, indent=2)
    directory = cache / "cascades" / hashlib.sha256(text.encode()).hexdigest()[:12]
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=directory, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, directory / "config.json")
    return directory


def find_parts(
    recogniser: str, voice: str, language: str, families: tuple[str, ...]
) -> tuple[SpeechModel, ModelFacts | None, SpeechModel | None]:
    """What hears and what speaks: a talker, or else a voice. Arguments and errors as of compose."""
    hears, talker = find_recogniser(recogniser, language), find_talker(voice, *families)
    return hears, talker, find_voice(voice) if talker is None else None


def demo_weights(cache: Path, report: Report) -> Path:
    """The file of the demo cascade's language model, fetched at first use."""
    return fetched(SMOLLM2, cache, report) / GGUF


def is_cascade(directory: Path) -> bool:
    """Whether the directory is a composed cascade."""
    return checkpoint_config(directory).get("architectures") == [ARCHITECTURE]


def fetched(package: Package, cache: Path, report: Report) -> Path:
    """The directory of the package's files; its licence is reported before a download."""
    target = packages_directory(cache) / package.directory_name
    if not target.exists():
        report(licence_line(package))
    return fetch(package, cache=cache, report=report)


def _entry(model: SpeechModel, cache: Path, report: Report) -> dict[str, Any]:
    """How the stage loads a recogniser or a voice (cascade/parts.py)."""
    path = model.path if model.package is None else fetched(model.package, cache, report)
    return {
        "part": model.load,
        "path": str(path),
        "packages": {
            name: str(fetched(package, cache, report)) for name, package in model.packages.items()
        },
    }
