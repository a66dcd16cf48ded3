"""Kokoro through onnxruntime: phonemes and a style to a waveform.

In: text. Out: int16 at 24 kHz, and the end of each word, from the network's durations where its
file exports them. The phonemes are those of hibari's reader, which has Kokoro's alphabet.
Files of users have two forms: a directory with `onnx/model.onnx` and one file for each voice in
`voices/`, and a file beside one with all voices, such as `kokoro-v1.0.onnx` and `voices-v1.0.bin`.
onnxruntime is imported when they are loaded: the server finds them without it.
Source: Kokoro-82M; StyleTTS 2, arXiv:2306.07691.
"""

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError
from sglang_live.models.hibari import EnglishReader, english_alphabet
from sglang_live.models.packages import (
    HIBARI,
    KOKORO_PARTS,
    KOKORO_STYLES,
    KOKORO_VOICES,
    import_fetched,
)
from sglang_live.models.phoneme_voice import (
    Ends,
    Floats,
    Phoneme,
    PhonemeVoice,
    ends_from_durations,
    estimated_ends,
    open_onnx,
)
from sglang_live.models.speech import FilesKind, SpeechModel

STYLE_SIZE = 256
# af_heart: American English, female. The other languages' phonemes are not made here.
_ENGLISH = re.compile(r"[ab][fm](_|$)")
_NAMED_BY_LANGUAGE = re.compile(r"[a-z][fm](_|$)")
_FAVOURITES = ("af_heart", "af")

Styles = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KokoroFiles:
    """
    model: the network.
    voices: a file with all voices, or a directory with a file for each.
    alphabet: id of each phoneme; None: Kokoro's usual one.
    """

    model: Path
    voices: Path
    alphabet: dict[str, int] | None

    def styles(self) -> dict[str, Styles]:
        """Of each English voice, one style vector for each number of phonemes: [n, 256].

        Raises:
            BadInputError: a file is broken, or no voice speaks English.
        """
        found = dict(sorted(_styles_in(self.voices).items()))
        english = {
            name: styles
            for name, styles in found.items()
            if _ENGLISH.match(name) or not _NAMED_BY_LANGUAGE.match(name)
        }
        if not english:
            raise BadInputError(
                f"{self.voices} has no English voice but {', '.join(found) or 'none'}: Kokoro's "
                "other languages are not spoken"
            )
        first = [name for name in _FAVOURITES if name in english]
        return {name: english[name] for name in (*first, *english)}


def kokoro_files(path: Path) -> KokoroFiles:
    """Raises BadInputError if it is not clear which network is meant."""
    root = _root(path)
    voices = _voices_of(root)
    assert voices is not None, "asked of paths that are claimed"
    return KokoroFiles(_model_of(path), voices, _alphabet_of(root))


def is_kokoro(path: Path) -> bool:
    has_model = path.is_file() or any(path.glob("*.onnx")) or any(path.glob("onnx/*.onnx"))
    return has_model and _voices_of(_root(path)) is not None


def kokoro_at(path: Path) -> SpeechModel:
    """Raises BadInputError if a file is broken, or no voice speaks English."""
    return SpeechModel(
        path=path,
        load="sglang_live.models.kokoro:KokoroVoice.load",
        packages={"english": HIBARI},
        offers=tuple(kokoro_files(path).styles()),
    )


PACKAGED_KOKORO = SpeechModel(
    package=KOKORO_STYLES,
    load="sglang_live.models.kokoro:KokoroVoice.packaged",
    packages={"english": HIBARI} | {part.name: part for part in KOKORO_PARTS},
    offers=KOKORO_VOICES,
)
KOKORO = FilesKind(
    holds="Kokoro (model.onnx or onnx/model.onnx, with voices/*.bin or voices*.bin)",
    claims=is_kokoro,
    read=kokoro_at,
)


def _root(path: Path) -> Path:
    if path.is_dir():
        return path
    return path.parent.parent if path.parent.name == "onnx" else path.parent


def _voices_of(root: Path) -> Path | None:
    if any((root / "voices").glob("*.bin")):
        return root / "voices"
    files = sorted(file for ending in ("bin", "npz") for file in root.glob(f"voices*.{ending}"))
    return files[0] if files else None


def _model_of(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted([*path.glob("*.onnx"), *path.glob("onnx/*.onnx")])
    plain = [file for file in found if file.name == "model.onnx"]
    if len(plain or found) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in found)
        raise BadInputError(f"{path} has several networks, give the path of one: {names}")
    return (plain or found)[0]


def _alphabet_of(root: Path) -> dict[str, int] | None:
    for name, keys in (("tokenizer.json", ("model", "vocab")), ("config.json", ("vocab",))):
        if not (root / name).is_file():
            continue
        try:
            found = json.loads((root / name).read_text(encoding="utf-8"))
            for key in keys:
                found = found.get(key, {})
        except (ValueError, AttributeError) as error:
            raise BadInputError(f"{root / name} is broken: {error}") from error
        if found:
            return {sign: number for sign, number in found.items() if len(sign) == 1}
    return None


def _styles_in(path: Path) -> dict[str, Styles]:
    try:
        if path.is_dir():
            return {
                file.stem: _checked(np.fromfile(file, np.float32)) for file in path.glob("*.bin")
            }
        with np.load(path, allow_pickle=False) as voices:
            return {name: _checked(voices[name]) for name in voices.files}
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise BadInputError(f"{path} has no voices of Kokoro: {error}") from error


def _checked(values: npt.NDArray[np.float32]) -> Styles:
    if values.size == 0 or values.size % STYLE_SIZE:
        raise ValueError(f"{values.size} numbers are no style vectors of {STYLE_SIZE}")
    return values.reshape(-1, STYLE_SIZE).astype(np.float32)


# The older exports say tokens.
_IDS = ("input_ids", "tokens")


class KokoroVoice(PhonemeVoice):
    """One per process."""

    @classmethod
    def load(cls, path: Path, *, english: Path, n_threads: int = 0) -> Self:
        """
        Args:
            path: see kokoro_files.
            english: directory with the rules for English, as returned by `fetch(HIBARI)`.
            n_threads: for one call; 0: see computing_threads.
        Raises:
            BadInputError: a file is broken.
        """
        files = kokoro_files(path)
        return cls._of(files.model, files.styles(), files.alphabet, english, n_threads)

    @classmethod
    def packaged(cls, path: Path, *, english: Path, **parts: Path) -> Self:
        """
        Args:
            path, parts: directories of KOKORO_STYLES and, in order, KOKORO_PARTS.
            english: as of load.
        """
        network = b"".join(next(part.glob("*/part.bin")).read_bytes() for part in parts.values())
        found = _styles_in(path / "package" / "voices")
        styles = {voice: found[voice] for voice in KOKORO_VOICES}
        return cls._of(network, styles, None, english)

    @classmethod
    def _of(
        cls,
        network: Path | bytes,
        styles: Mapping[str, Styles],
        alphabet: Mapping[str, int] | None,
        english: Path,
        n_threads: int = 0,
    ) -> Self:
        alphabet = alphabet or english_alphabet(english)
        session = open_onnx(network, ("style", "speed"), n_threads)
        reader = EnglishReader(import_fetched(english, "hibari"), alphabet)
        return cls(KokoroNetwork(session, alphabet, styles), reader, tuple(styles))


class KokoroNetwork:
    """An AcousticNetwork."""

    sample_rate_hz = 24_000
    # Its positions are 512, two of which are of the pads at the ends.
    max_phonemes = 510

    def __init__(
        self, session: Any, alphabet: Mapping[str, int], styles: Mapping[str, Styles]
    ) -> None:
        self._session = session
        self._alphabet = alphabet
        self._styles = styles
        types = {given.name: given.type for given in session.get_inputs()}
        [self._ids] = [name for name in types if name in _IDS]
        self._speed_type = np.int32 if "int32" in types["speed"] else np.float32
        # By name: their number and order differ between exports.
        names = [given.name for given in session.get_outputs()]
        durations = [name for name in names if name.startswith("duration")]
        waves = [name for name in names if name in ("waveform", "audio")]
        self._outputs = [*(waves or names)[:1], *durations[:1]]
        self.times_phonemes = bool(durations)

    def speak(self, piece: Sequence[Phoneme], voice: str) -> tuple[Floats, Ends]:
        """See AcousticNetwork."""
        ids = [0, *(self._alphabet[phoneme.sign] for phoneme in piece), 0]
        styles = self._styles[voice]
        inputs = {
            self._ids: np.array([ids], np.int64),
            # The style of a voice depends on the number of phonemes.
            "style": styles[min(len(piece), len(styles)) - 1][None],
            "speed": np.array([1.0], self._speed_type),
        }
        found, *durations = self._session.run(self._outputs, inputs)
        wave: Floats = found.reshape(-1)
        if durations:
            return wave, ends_from_durations(durations[0], len(wave))[1:-1]
        return wave, estimated_ends(piece, wave)
