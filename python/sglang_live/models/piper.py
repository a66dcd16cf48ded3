"""Piper through onnxruntime: phonemes to a waveform.

In: text. Out: int16 at the voice's own rate, and the end of each word: from the network's
durations where its file exports them, otherwise estimated.
Files of users are NAME.onnx with settings in NAME.onnx.json. Phonemes are those of hibari's reader
for English, of the program espeak-ng, or the text's own characters.
Source: VITS, arXiv:2106.06103.
"""

import re
import shutil
import subprocess
import unicodedata
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.family import read_json
from sglang_live.models.hibari import EnglishReader
from sglang_live.models.packages import HIBARI
from sglang_live.models.phoneme_voice import (
    CLAUSE_ENDS,
    Ends,
    Floats,
    Phoneme,
    PhonemeVoice,
    TextReader,
    Word,
    ends_from_durations,
    estimated_ends,
    open_onnx,
)
from sglang_live.models.speech import FilesKind, SpeechModel
from sglang_live.speakable.style import SpeechStyle

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
        load="sglang_live.models.piper:PiperVoice.load",
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


_LATIN = frozenset(("LATIN",))
_SCRIPTS = {
    "CYRILLIC": "ba be bg cv kk ky mk mn ru sr tt uk",
    "GREEK": "el",
    "ARABIC": "ar fa ku ps sd ug ur",
    "HEBREW": "he",
    "DEVANAGARI": "hi kok mr ne",
    "BENGALI": "as bn bpy",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "ORIYA": "or",
    "TAMIL": "ta",
    "TELUGU": "te",
    "SINHALA": "si",
    "MYANMAR": "my",
    "THAI": "th",
    "GEORGIAN": "ka",
    "ARMENIAN": "hy hyw",
    "ETHIOPIC": "am",
    "HANGUL": "ko",
    "CJK": "cmn hak ja yue zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
}  # fmt: skip


def style_of(language: str) -> SpeechStyle:
    """
    Args:
        language: as espeak-ng names it, such as "de" or "pt-br".
    """
    code = language.partition("-")[0]
    if code == "en":
        return SpeechStyle()
    own = {script for script, codes in _SCRIPTS.items() if code in codes.split()}
    return SpeechStyle(scripts=_LATIN | own, english=False, says_code="", says_table="")


_TIMEOUT_S = 10.0
_SENTENCE_ENDS = frozenset(".!?")
# Of a word in another language, as in "(en)".
_LANGUAGE = re.compile(r"\([\w-]+\)")


class CharacterReader:
    """A TextReader of a voice that was trained on characters."""

    def __init__(self, alphabet: Container[str]) -> None:
        self._alphabet = alphabet

    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        words = words_of(text)
        sentences = [
            [
                Phoneme(sign, number)
                for number in clause
                for sign in _signs(f"{words[number].written.casefold()} ")
                if sign in self._alphabet
            ]
            for clause in clauses_of(words)
        ]
        return words, sounding(sentences)


class EspeakReader:
    """A TextReader. The program is started once for each clause."""

    def __init__(self, language: str, alphabet: Container[str]) -> None:
        """language: as the program names it."""
        self._language = language
        self._alphabet = alphabet

    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        """Raises LiveError if the program fails."""
        words = words_of(text)
        sentences = [list(self._clause(words, clause)) for clause in clauses_of(words)]
        return words, sounding(sentences)

    def _clause(self, words: Sequence[Word], numbers: Sequence[int]) -> Iterator[Phoneme]:
        written = " ".join(words[number].written for number in numbers)
        groups = self._phonemes_of(written).split()
        for at, group in enumerate(groups):
            number = numbers[_place(at, len(groups), len(numbers))]
            for sign in _signs(f"{group} " if at + 1 < len(groups) else group):
                if sign in self._alphabet:
                    yield Phoneme(sign, number)
        if groups:
            end = written[-1] if written[-1] in CLAUSE_ENDS else ""
            yield from (Phoneme(sign, numbers[-1]) for sign in f"{end} " if sign in self._alphabet)

    def _phonemes_of(self, clause: str) -> str:
        command = [ESPEAK, "-q", "--ipa", "-b", "1", "-v", self._language, "--stdin"]
        try:
            done = subprocess.run(
                command, input=clause.encode(), capture_output=True, timeout=_TIMEOUT_S, check=True
            )
        except subprocess.CalledProcessError as error:
            cause = error.stderr.decode(errors="replace").strip() or f"exit {error.returncode}"
            raise LiveError(f"{ESPEAK} failed for {self._language}: {cause}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LiveError(f"{ESPEAK} failed: {error}") from error
        return _LANGUAGE.sub("", done.stdout.decode(errors="replace"))


def words_of(text: str) -> list[Word]:
    return [Word(found[0], found.end()) for found in re.finditer(r"\S+", text)]


def clauses_of(words: Sequence[Word]) -> Iterator[list[int]]:
    """Numbers of the words up to each mark of punctuation."""
    clause: list[int] = []
    for number, word in enumerate(words):
        clause.append(number)
        if word.written[-1] in CLAUSE_ENDS:
            yield clause
            clause = []
    if clause:
        yield clause


def sounding(clauses: Sequence[list[Phoneme]]) -> list[list[Phoneme]]:
    """Sentences of clauses; without those that make no sound."""
    sentences: list[list[Phoneme]] = [[]]
    for clause in clauses:
        sentences[-1] += clause
        if any(phoneme.sign in _SENTENCE_ENDS for phoneme in clause):
            sentences.append([])
    return [s for s in sentences if any(not phoneme.is_silent for phoneme in s)]


def _place(at: int, n_groups: int, n_words: int) -> int:
    """Number of the word that a group of phonemes is of. Figures become several groups, some words
    are joined to one: the places of both are alike."""
    if n_groups >= n_words:
        return at * n_words // n_groups
    return ((at + 1) * n_words - 1) // n_groups


def _signs(text: str) -> str:
    """The networks know combining marks by themselves."""
    return unicodedata.normalize("NFD", text)


_SIGNS = {
    "A": "eɪ", "I": "aɪ", "O": "oʊ", "Q": "əʊ", "W": "aʊ", "Y": "ɔɪ",
    "ʤ": "dʒ", "ʧ": "tʃ", "T": "ɾ", "ᵊ": "ə",
    "u": "uː", "ɑ": "ɑː", "ɔ": "ɔː",
    "—": ",", "…": ".",
}  # fmt: skip
_RHOTIC = {"ɜ": "ɜː", "ə": "ɚ"}
_STRESS = frozenset("ˈˌ")
_VOWELS = frozenset("AIOQWYaeiouæɐɑɒɔəɚɛɜɪʊʌᵊᵻ")


class EnglishAsEspeak:
    """A TextReader."""

    def __init__(self, reader: TextReader, alphabet: Container[str]) -> None:
        """alphabet: the phonemes that the network knows; others make no sound."""
        self._reader = reader
        self._alphabet = alphabet

    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        words, sentences = self._reader.read(text)
        known = [
            [sign for sign in as_espeak(sentence) if sign.sign in self._alphabet]
            for sentence in sentences
        ]
        return words, [s for s in known if any(not sign.is_silent for sign in s)]


def as_espeak(phonemes: Sequence[Phoneme]) -> list[Phoneme]:
    """The same phonemes in espeak-ng's signs, of which one may be several."""
    found: list[Phoneme] = []
    signs = "".join(phoneme.sign for phoneme in phonemes)
    at = 0
    while at < len(signs):
        sign, following = signs[at], signs[at + 1 : at + 3]
        n_read, written = 1, _SIGNS.get(sign, sign)
        if sign in _RHOTIC and following[:1] == "ɹ":
            # The r is heard only before another vowel.
            after = following[1:].strip("ˈˌ") or signs[at + 3 : at + 4]
            written, n_read = _RHOTIC[sign], 1 if after in _VOWELS and after else 2
        elif sign == "i" and at and signs[at - 1] in _STRESS:
            written = "iː"
        found += [Phoneme(character, phonemes[at].word) for character in written]
        at += n_read
    return found


_BEGIN, _PAD, _END = "^", "_", "$"


class PiperVoice(PhonemeVoice):
    """One per process."""

    @classmethod
    def load(cls, path: Path, *, english: Path | None = None, n_threads: int = 0) -> Self:
        """
        Args:
            path: see piper_files.
            english: directory with the rules for English, as returned by `fetch(HIBARI)`; None: the
                voice does not need them.
            n_threads: for one call; 0: see computing_threads.
        Raises:
            BadInputError: a file is broken.
        """
        files = piper_files(path)
        session = open_onnx(files.model, ("input", "input_lengths", "scales"), n_threads)
        network = PiperNetwork(session, files)
        reader = _reader_of(files, english)
        return cls(network, reader, tuple(files.speakers), style_of(files.language))


class PiperNetwork:
    """An AcousticNetwork."""

    # Its memory grows with the square; a sentence has fewer.
    max_phonemes = 400

    def __init__(self, session: Any, files: PiperFiles) -> None:
        self._session = session
        self._files = files
        self._takes_speaker = "sid" in [given.name for given in session.get_inputs()]
        self.times_phonemes = len(session.get_outputs()) > 1

    @property
    def sample_rate_hz(self) -> int:
        return self._files.sample_rate_hz

    def speak(self, piece: Sequence[Phoneme], voice: str) -> tuple[Floats, Ends]:
        """See AcousticNetwork."""
        ids, last = self._ids_of(piece)
        noise, length, duration_noise = self._files.scales
        inputs = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array([noise, length, duration_noise], np.float32),
        }
        if self._takes_speaker:
            inputs["sid"] = np.array([self._files.speakers[voice]], np.int64)
        found, *more = self._session.run(None, inputs)
        wave: Floats = found.reshape(-1)
        if self.times_phonemes:
            return wave, ends_from_durations(more[0], len(wave))[last]
        return wave, estimated_ends(piece, wave)

    def _ids_of(self, piece: Sequence[Phoneme]) -> tuple[list[int], list[int]]:
        """Ids of a piece, and the place of each phoneme's last one."""
        alphabet = self._files.alphabet
        ids, last = [*alphabet[_BEGIN], *alphabet[_PAD]], []
        for phoneme in piece:
            ids += [*alphabet[phoneme.sign], *alphabet[_PAD]]
            last.append(len(ids) - 1)
        return [*ids, *alphabet[_END]], last


def _reader_of(files: PiperFiles, english: Path | None) -> TextReader:
    if files.phonemes == "text":
        return CharacterReader(files.alphabet)
    if files.needs_espeak:
        return EspeakReader(files.language, files.alphabet)
    assert english is not None, "see piper_at"
    return EnglishAsEspeak(EnglishReader.load(english), files.alphabet)
