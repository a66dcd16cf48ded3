"""Where the served model comes from: a directory, a demo, or a cascade that is composed.

Without torch: the server checks its model before it starts a stage.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.checkpoint_files import check_checkpoint
from sglang_live.models.composition import CASCADE, RECOGNISERS, VOICES, compose, demo_llm
from sglang_live.models.demo.location import (
    CACHE_ENV,
    DEMO,
    DEMO_RANDOM,
    TRAINED,
    default_directory,
)
from sglang_live.models.family import ModelFacts, model_facts
from sglang_live.stages.endings import telling_line

_DEFAULT_RECOGNISER, _DEFAULT_VOICE = next(iter(RECOGNISERS)), next(iter(VOICES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """
    path: directory of a checkpoint, or the name of a demo.
    families: modules of model families outside this package.
    recogniser, voice: what hears and reads for a language model; both or none.
    """

    path: str
    families: tuple[str, ...] = ()
    recogniser: str = ""
    voice: str = ""

    def __post_init__(self) -> None:
        if bool(self.recogniser) != bool(self.voice) and self.path != CASCADE:
            raise BadInputError("--recogniser and --voice-model belong together")

    @staticmethod
    def of(own: argparse.Namespace) -> "ModelSource":
        return ModelSource(
            path=own.model_path,
            families=tuple(own.model_family),
            recogniser=own.recogniser,
            voice=own.voice_model,
        )

    def load(self, cache_dir: Path) -> ModelFacts:
        """
        Args:
            cache_dir: for what is downloaded, built or derived.
        Raises:
            BadInputError: no model family claims the path, or a file of it is broken.
            LiveError: something cannot be downloaded or built.
        """
        facts = model_facts(self._directory(cache_dir), *self.families)
        check_checkpoint(facts.weights)
        return facts

    def _directory(self, cache_dir: Path) -> Path:
        if self.path == DEMO:
            return TRAINED
        if self.path == DEMO_RANDOM:
            return _random_demo(cache_dir)
        is_cascade = self.path == CASCADE
        if not (self.recogniser or is_cascade):
            return Path(self.path)
        llm = demo_llm(cache_dir, _report) if is_cascade else Path(self.path)
        recogniser, voice = self.recogniser or _DEFAULT_RECOGNISER, self.voice or _DEFAULT_VOICE
        return compose(llm, recogniser, voice, cache_dir, _report)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model-path",
        required=True,
        help=f"checkpoint directory, or {DEMO}, {DEMO_RANDOM}, {CASCADE}",
    )
    add(
        "--model-family",
        metavar="MODULE",
        action="append",
        default=[],
        help="module of a model family outside this package (docs/new_model.md); repeatable",
    )
    add(
        "--recogniser",
        default="",
        help=f"hears for a language model that only reads: {', '.join(RECOGNISERS)}",
    )
    add(
        "--voice-model",
        default="",
        help=f"reads the text of a language model aloud: {', '.join(VOICES)}",
    )


def _report(line: str) -> None:
    print(line, flush=True)


def _random_demo(cache_dir: Path) -> Path:
    """The random demo model in cache_dir, built if it is absent."""
    directory = default_directory(cache=cache_dir)
    if not (directory / "config.json").exists():
        print("building the random demo model", flush=True)
        # In another process, so that this one imports neither torch nor transformers.
        command = [sys.executable, "-m", "sglang_live.models.demo.build"]
        environment = {**os.environ, CACHE_ENV: str(cache_dir)}
        built = subprocess.run(command, env=environment, capture_output=True, text=True)
        if built.returncode:
            cause = telling_line(built.stderr.splitlines()) or f"exit {built.returncode}"
            raise LiveError(f"cannot build the random demo model in {cache_dir}: {cause}")
    return directory
