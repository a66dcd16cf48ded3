"""Where the served model comes from: a directory, a demo, or a cascade that is composed.

Without torch: the server checks its model before it starts a stage.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from sglang_live.environment import (
    CACHE_ENV,
    FolderConfig,
    check_cache_folder,
    start_in_utf8_mode,
)
from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.checkpoint_files import check_checkpoint, find_checkpoint
from sglang_live.models.composition import (
    CASCADE,
    compose,
    demo_weights,
    find_parts,
    is_cascade,
)
from sglang_live.models.demo.location import (
    DEMO,
    DEMO_RANDOM,
    TRAINED,
    default_directory,
)
from sglang_live.models.family import (
    INT8,
    ModelFacts,
    checkpoint_config,
    claiming_family,
    model_facts,
)
from sglang_live.models.smollm2.location import converted_directory, is_converted
from sglang_live.models.speech_kinds import RECOGNISERS, VOICES
from sglang_live.models.voice_files import voice_files, words_of
from sglang_live.settings import Settings, add_flags, flag, read_flags
from sglang_live.stages.endings import telling_line

OFFLINE = 3
_DEFAULT_RECOGNISER, _DEFAULT_VOICE = next(iter(RECOGNISERS)), next(iter(VOICES))


@dataclass(frozen=True, slots=True)
class Introduction:
    """What the page says of a model.

    suggestions: questions that it can answer.
    """

    about: str = ""
    suggestions: tuple[str, ...] = ()


_INTRODUCTIONS = {
    CASCADE: Introduction(
        "SmolLM2 hears, thinks and speaks English, with 135 million parameters: ask anything, and "
        "expect mistakes.",
        ("Why is the sky blue?", "Tell me about the moon.", "What do cats like to eat?"),
    ),
    DEMO: Introduction(
        "The demo model knows a few dozen questions.",
        ("What is the capital of France?", "Tell me a joke.", "Tell me a story."),
    ),
    DEMO_RANDOM: Introduction("This model responds to anything, with random words.", ("Hello!",)),
}

_BUILT_IN = tuple(_INTRODUCTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource(Settings):
    path: str = flag(
        MISSING,
        f"checkpoint directory, or {DEMO}, {DEMO_RANDOM}, {CASCADE}",
        name="model-path",
        value="PATH",
    )
    families: tuple[str, ...] = flag(
        (),
        "module of a model family outside this package (docs/new_model.md); repeatable",
        name="model-family",
        value="MODULE",
    )
    recogniser: str = flag(
        "",
        f"hears for a language model that only reads: {', '.join(RECOGNISERS)}, or a directory "
        "(docs/cascade.md)",
        value="NAME|PATH",
    )
    language: str = flag(
        "",
        "that users speak, such as de",
        name="recogniser-language",
        value="CODE",
        unset="detected in each utterance",
    )
    voice: str = flag(
        "",
        f"reads the text of a language model aloud: {', '.join(VOICES)}, or a directory or file "
        "(docs/cascade.md)",
        name="voice-model",
        value="NAME|PATH",
    )
    recordings: Path | None = flag(
        None,
        "recordings of speakers, one file for each, whose voices the model takes on; the file's "
        "name is the voice's (docs/cascade.md)",
        name="voices",
        value="DIR",
        read=lambda text: Path(text).resolve() if text else None,
    )

    def check(self) -> None:
        if bool(self.recogniser) != bool(self.voice) and self.path != CASCADE:
            raise BadInputError("--recogniser and --voice-model belong together")
        if self.language and not self.recogniser:
            raise BadInputError("--recogniser-language needs --recogniser")

    @property
    def usual_name(self) -> str:
        """For clients: the last part of the path."""
        return Path(self.path).resolve().name

    @property
    def introduction(self) -> Introduction:
        """Nothing is known of a user's own checkpoint."""
        return _INTRODUCTIONS.get(self.path, Introduction())

    def load(self, cache_dir: Path) -> ModelFacts:
        """
        Args:
            cache_dir: for what is downloaded, built or derived.
        Raises:
            BadInputError: no model family claims the path, a file of it is broken, or cache_dir
                cannot be written.
            LiveError: something cannot be downloaded or built.
        """
        check_cache_folder(cache_dir)
        facts = self._with_recordings(model_facts(self._directory(cache_dir), *self.families))
        check_checkpoint(facts.weights)
        return facts

    def _with_recordings(self, facts: ModelFacts) -> ModelFacts:
        speaks = self.voice or self.path
        if self.recordings is None:
            if not facts.voices and facts.clones_voices:
                raise BadInputError(
                    f"{speaks} has no voices of its own: give recordings of speakers, --voices DIR"
                )
            return facts
        if not facts.clones_voices:
            others = "Chatterbox, CosyVoice, CSM, Higgs, MOSS-TTS, Zonos and Qwen3-TTS Base do"
            if facts.made_voices:
                others = f"its own are those of {facts.made_voices}"
            raise BadInputError(
                f"--voices: {speaks} has no speaker encoder, so it takes on no voices; {others}"
            )
        names = voice_files(self.recordings)
        known = {name.lower() for name in facts.voices}
        if same := [file for name, file in names.items() if name.lower() in known]:
            raise BadInputError(f"--voices: {same[0]} has the name of a voice of {speaks}")
        if facts.voices_need_words:
            for file in names.values():
                words_of(file)
        return replace(facts, voices=(*facts.voices, *names), recordings=self.recordings)

    def _directory(self, cache_dir: Path) -> Path:
        if self.path == DEMO:
            return TRAINED
        if self.path == DEMO_RANDOM:
            return _random_demo(cache_dir)
        if not self.recogniser and self.path != CASCADE:
            directory = find_checkpoint(self.path, _BUILT_IN)
            if is_cascade(directory):
                # Its config names code to load, which must not come with a checkpoint.
                raise BadInputError(
                    f"{directory} is a composed cascade: give its language model as --model-path, "
                    "with --recogniser and --voice-model"
                )
            return directory
        recogniser, voice = self.recogniser or _DEFAULT_RECOGNISER, self.voice or _DEFAULT_VOICE
        find_parts(recogniser, voice, self.language, self.families)  # before a download
        llm = _demo_llm(cache_dir) if self.path == CASCADE else self._llm()
        return compose(
            llm,
            recogniser,
            voice,
            cache_dir,
            _report,
            language=self.language,
            cpu_weights=INT8 if self.path == CASCADE else "",
            families=self.families,
        )

    def _llm(self) -> Path:
        directory = find_checkpoint(self.path, _BUILT_IN)
        family = claiming_family(checkpoint_config(directory), *self.families)
        if family is not None and family.thinker is None:
            raise BadInputError(
                f"--recogniser: {directory} only speaks: leave --recogniser and --voice-model out, "
                "or give a language model as --model-path and this as --voice-model"
            )
        return directory


def _report(line: str) -> None:
    print(line, flush=True)


def _random_demo(cache_dir: Path) -> Path:
    """The random demo model in cache_dir, built if it is absent."""
    directory = default_directory(cache=cache_dir)
    if not (directory / "config.json").exists():
        _report("building the random demo model")
        _run("sglang_live.models.demo.build", cache_dir=cache_dir)
    return directory


def _demo_llm(cache_dir: Path) -> Path:
    """The language model of the demo's cascade, fetched and converted if it is absent."""
    directory = converted_directory(cache_dir)
    if not is_converted(directory):
        weights = demo_weights(cache_dir, _report)
        _report(f"converting {weights.name}")
        _run(
            "sglang_live.models.smollm2.convert", str(weights), str(directory), cache_dir=cache_dir
        )
    return directory


def main(argv: list[str] | None = None) -> int:
    """Download and build what a model needs, without starting a server.

    Returns:
        Exit status: 2 if the model cannot be used, OFFLINE if a download failed.
    """
    parser = argparse.ArgumentParser(prog="python -m sglang_live.model_source")
    add_flags(parser, ModelSource)
    add_flags(parser, FolderConfig, "cache_dir")
    own = parser.parse_args(argv)
    try:
        read_flags(own, ModelSource).load(read_flags(own, FolderConfig).cache_dir)
    except BadInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except LiveError as error:
        print(f"error: {error}", file=sys.stderr)
        return OFFLINE
    return 0


def _run(module: str, *arguments: str, cache_dir: Path) -> None:
    """Run a module in another process, so that this one imports neither torch nor transformers."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, CACHE_ENV: str(cache_dir)}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    if done.returncode:
        cause = telling_line(done.stderr.splitlines()) or f"exit {done.returncode}"
        raise LiveError(f"{module} failed in {cache_dir}: {cause}")


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
