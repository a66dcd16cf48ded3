"""A voice that is a reader of text and an acoustic network: text to phonemes, phonemes to sound.

What hibari, Kokoro and Piper share: limits, pieces that a network takes at once, and the end of
each word, from durations of phonemes or by their share of the sound.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError
from sglang_live.models.speech import Speech, SpokenWord, computing_threads
from sglang_live.speakable.style import SpeechStyle


def open_onnx(path: Path | bytes, inputs: Collection[str], n_threads: int = 0) -> Any:
    """An onnxruntime session.

    Args:
        path: the file, or what is in it.
        inputs: that the network must have.
        n_threads: for one call; 0: see computing_threads.
    Raises:
        BadInputError: the file is broken, or it is another network.
    """
    import onnxruntime

    name = f"{len(path)} bytes" if isinstance(path, bytes) else str(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads or computing_threads()
    options.inter_op_num_threads = 1
    # A thread that spins between two operators takes the engine's core.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # exported networks have unused weights, which are logged
    # Products of uint8 and int8 overflow on x86 processors that lack VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        session = onnxruntime.InferenceSession(
            path if isinstance(path, bytes) else name,
            options,
            providers=["CPUExecutionProvider"],
        )
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        raise BadInputError(f"onnxruntime cannot read {name}: {error}") from error
    found = [given.name for given in session.get_inputs()]
    if missing := [name for name in inputs if name not in found]:
        raise BadInputError(
            f"{name} is another network: its inputs are {', '.join(found)}, without "
            f"{', '.join(missing)}"
        )
    return session


CLAUSE_ENDS = frozenset(".,;:!?—…")
_SILENT = CLAUSE_ENDS | frozenset(' "()“”')


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the text between white space; end: index in the text after it."""

    written: str
    end: int


@dataclass(frozen=True, slots=True)
class Phoneme:
    """sign: one character of the model's alphabet; word: number of the word it belongs to."""

    sign: str
    word: int

    @property
    def is_silent(self) -> bool:
        return self.sign in _SILENT


class TextReader(Protocol):
    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        """
        Returns:
            The text's words, and the phonemes of each sentence that has some.
        """
        ...


def pieces(phonemes: Sequence[Phoneme], n_most: int) -> Iterator[Sequence[Phoneme]]:
    """Cut a sentence that exceeds `n_most` phonemes: after a clause, else after a word."""
    while len(phonemes) > n_most:
        spaces = [at for at in range(1, n_most) if phonemes[at].sign == " "]
        clauses = [at for at in spaces if phonemes[at - 1].sign in CLAUSE_ENDS]
        cut = (clauses or spaces or [n_most])[-1]
        yield stripped(phonemes[:cut])
        phonemes = stripped(phonemes[cut:])
    yield stripped(phonemes)


def stripped(phonemes: Sequence[Phoneme]) -> Sequence[Phoneme]:
    """Without spaces at the ends."""
    sounding = [at for at, phoneme in enumerate(phonemes) if phoneme.sign != " "]
    return phonemes[sounding[0] : sounding[-1] + 1] if sounding else ()


def word_ends(
    words: Sequence[Word], ends_s: Iterable[tuple[int, float]]
) -> list[tuple[int, float]]:
    """
    Args:
        ends_s: number of a word, and the end of one of its phonemes in seconds.
    Returns:
        Of each word, its end in the text and in seconds; the latter never decreases.
    """
    latest = [0.0] * len(words)
    for number, end_s in ends_s:
        latest[number] = max(latest[number], end_s)
    result = []
    end_s = 0.0
    for word, own_s in zip(words, latest, strict=True):
        end_s = max(end_s, own_s)
        result.append((word.end, end_s))
    return result


# Quieter than a hundredth of the loudest sample is silence, before the first phoneme and after the
# last.
_QUIET = 100
# Shares of the sound: stress and length marks belong to the vowel beside them. With longer pauses
# than the networks make, words are in place: 0.09 s from hibari's durations in the median.
_MARKS = frozenset("ˈˌː")
_PAUSE = 4.0

Numbers = npt.NDArray[np.floating] | npt.NDArray[np.integer]


def ends_from_durations(
    durations: npt.NDArray[np.float32], n_samples: int
) -> npt.NDArray[np.int64]:
    """
    Args:
        durations: of each id, in any unit.
    Returns:
        [n_ids] int64, the sample after each id's last.
    """
    sums = np.cumsum(durations.reshape(-1).astype(np.float64))
    ends: npt.NDArray[np.int64] = np.rint(sums * (n_samples / max(sums[-1], 1e-9))).astype(np.int64)
    return ends


def estimated_ends(
    piece: Sequence[Phoneme], wave: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """For a network that tells no durations: every phoneme takes the same part of the sound.

    Returns:
        [n_phonemes] int64, the sample after each phoneme's last.
    """
    level = np.abs(wave)
    loud = np.flatnonzero(level * _QUIET > level.max(initial=0.0))
    first, last = (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, len(wave))
    shares = np.array([_share(phoneme.sign) for phoneme in piece])
    # The mark after the last word is the silence that is left out.
    while len(piece) and piece[-1].is_silent:
        shares[len(piece) - 1] = 0.0
        piece = piece[:-1]
    return first + ends_from_durations(shares, last - first)


def _share(sign: str) -> float:
    if sign in CLAUSE_ENDS:
        return _PAUSE
    return 0.0 if sign in _MARKS or sign.isspace() else 1.0


MAX_CHARACTERS = 1000

Floats = npt.NDArray[np.float32]
Ends = npt.NDArray[np.int64]


class AcousticNetwork(Protocol):
    @property
    def sample_rate_hz(self) -> int: ...

    @property
    def max_phonemes(self) -> int:
        """Of one call."""
        ...

    @property
    def times_phonemes(self) -> bool:
        """Whether their ends are the network's own; otherwise they are estimated."""
        ...

    def speak(self, piece: Sequence[Phoneme], voice: str) -> tuple[Floats, Ends]:
        """
        Returns:
            wave: [n_samples] float32, about -1 to 1.
            ends: [n_phonemes] int64, the sample after each phoneme's last.
        """
        ...


class PhonemeVoice:
    """A Voice (models/speech.py). May be used by several threads."""

    def __init__(
        self,
        network: AcousticNetwork,
        reader: TextReader,
        voices: Sequence[str],
        style: SpeechStyle | None = None,
    ) -> None:
        self._network = network
        self._reader = reader
        self._voices = tuple(voices)
        self._style = style or SpeechStyle()

    @property
    def sample_rate_hz(self) -> int:
        return self._network.sample_rate_hz

    @property
    def voices(self) -> tuple[str, ...]:
        return self._voices

    @property
    def style(self) -> SpeechStyle:
        return self._style

    @property
    def times_words(self) -> bool:
        return self._network.times_phonemes

    def synthesise(self, text: str, voice: str) -> Speech:
        """Read a text aloud, sentence by sentence.

        Args:
            text: at most MAX_CHARACTERS. What has no pronunciation, such as an emoji or another
                script, makes no sound.
            voice: one of `voices`.
        Raises:
            BadInputError: one of them is beyond its limits.
        """
        if len(text) > MAX_CHARACTERS:
            raise BadInputError(
                f"The text has {len(text)} characters; at most {MAX_CHARACTERS} are spoken at "
                "once. Send it in pieces, such as sentences."
            )
        if voice not in self._voices:
            raise BadInputError(f"Unknown voice {voice!r}: {', '.join(self._voices)} can be used.")
        words, sentences = self._reader.read(text)
        waves: list[Floats] = []
        ends: list[tuple[int, float]] = []
        n_samples = 0
        for sentence in sentences:
            for piece in pieces(sentence, self._network.max_phonemes):
                wave, piece_ends = self._network.speak(piece, voice)
                ends += [
                    (phoneme.word, (n_samples + int(end)) / self.sample_rate_hz)
                    for phoneme, end in zip(piece, piece_ends, strict=True)
                    if not phoneme.is_silent
                ]
                waves.append(wave)
                n_samples += len(wave)
        if not waves:
            return Speech(pcm=np.zeros(0, np.int16))
        wave = np.clip(np.concatenate(waves), -1.0, 1.0)
        return Speech(
            pcm=(wave * 32767).astype(np.int16),
            words=tuple(SpokenWord(end, end_s) for end, end_s in word_ends(words, ends)),
        )
