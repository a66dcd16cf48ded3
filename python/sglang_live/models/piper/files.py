"""ONNX files of Piper's voices, each with its settings in NAME.onnx.json. Without onnxruntime."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.family import read_json
from sglang_live.models.packages.pins import HIBARI
from sglang_live.models.speech_model import FilesKind, SpeechModel

# A program for languages other than English. Its licence is GPL-3.0: the user installs it.
ESPEAK = "espeak-ng"


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperFiles:
    """
    Attributes:
        model: the network.
        sample_rate_hz: of its sound.
        alphabet: ids of each phoneme.
        phonemes: "espeak": its phonemes are those of espeak-ng; "text": characters.
        language: as espeak-ng names it, such as "en-us".
        speakers: number of each voice by name.
        scales: noise of the sound, length, noise of the durations.
    """

    model: Path
    sample_rate_hz: int
    alphabet: dict[str, list[int]]
    phonemes: str
    language: str
    speakers: dict[str, int]
    scales: tuple[float, float, float]

    @property
    def is_english(self) -> bool:
        return self.language.partition("-")[0] == "en"

    @property
    def needs_espeak(self) -> bool:
        return self.phonemes == "espeak" and not self.is_english


def is_piper(path: Path) -> bool:
    return bool(_models_at(path))


def piper_files(path: Path) -> PiperFiles:
    """Raises BadInputError if there are several voices, or one's settings are broken."""
    models = _models_at(path)
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise BadInputError(f"{path} has several voices, give the path of one: {names}")
    [model] = models
    config = _config_of(model)
    try:
        return _files_of(model, read_json(config))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cause = f"lacks {error}" if isinstance(error, KeyError) else f"is broken: {error}"
        raise BadInputError(f"{config} {cause}: it is no voice of Piper") from error


def piper_at(path: Path) -> SpeechModel:
    """Raises BadInputError if its settings are broken, or its language needs a program."""
    files = piper_files(path)
    if files.needs_espeak and shutil.which(ESPEAK) is None:
        raise BadInputError(
            f"{files.model.name} speaks {files.language}, whose phonemes come from the program "
            f"{ESPEAK}, which is not installed (apt install {ESPEAK}; its licence is GPL-3.0)"
        )
    return SpeechModel(
        path=path,
        load="sglang_live.models.piper.voice:PiperVoice.load",
        packages={"english": HIBARI} if files.phonemes == "espeak" and files.is_english else {},
        offers=tuple(files.speakers),
    )


PIPER = FilesKind(holds="Piper (NAME.onnx with NAME.onnx.json)", claims=is_piper, read=piper_at)


def _config_of(model: Path) -> Path:
    return model.with_name(f"{model.name}.json")


def _models_at(path: Path) -> list[Path]:
    found = sorted(path.glob("*.onnx")) if path.is_dir() else [path]
    return [file for file in found if file.suffix == ".onnx" and _config_of(file).is_file()]


def _files_of(model: Path, config: dict[str, Any]) -> PiperFiles:
    phonemes = config.get("phoneme_type", "espeak")
    if phonemes not in ("espeak", "text"):
        raise ValueError(f"phonemes of the type {phonemes!r} are not supported")
    alphabet = config["phoneme_id_map"]
    for sign in "^_$":
        if sign not in alphabet:
            raise ValueError(f"phoneme_id_map has no {sign!r}")
    inference = config.get("inference", {})
    name = config.get("dataset") or model.stem
    speakers = dict(sorted(config.get("speaker_id_map", {}).items(), key=lambda entry: entry[1]))
    n_speakers = int(config.get("num_speakers", 1))
    if n_speakers > 1 and not speakers:
        speakers = {f"{name}-{number}": number for number in range(n_speakers)}
    return PiperFiles(
        model=model,
        sample_rate_hz=int(config["audio"]["sample_rate"]),
        alphabet=alphabet,
        phonemes=phonemes,
        language=config["espeak"]["voice"],
        speakers=speakers or {name: 0},
        scales=(
            float(inference.get("noise_scale", 0.667)),
            float(inference.get("length_scale", 1.0)),
            float(inference.get("noise_w", 0.8)),
        ),
    )
