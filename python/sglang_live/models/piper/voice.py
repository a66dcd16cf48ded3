"""Piper through onnxruntime: phonemes to a waveform.

In: text. Out: int16 at the voice's own rate, and the end of each word: from the network's
durations where its file exports them, otherwise estimated.
Source: VITS, arXiv:2106.06103.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from sglang_live.models.hibari.reading import EnglishReader
from sglang_live.models.onnx_model import open_onnx
from sglang_live.models.phoneme_voice import Ends, Floats, PhonemeVoice
from sglang_live.models.phonemes import Phoneme, TextReader
from sglang_live.models.piper.english import EnglishAsEspeak
from sglang_live.models.piper.espeak import CharacterReader, EspeakReader
from sglang_live.models.piper.files import PiperFiles, piper_files
from sglang_live.models.piper.languages import style_of
from sglang_live.models.word_times import ends_from_durations, estimated_ends

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

    def speak(self, piece: Sequence[Phoneme], voice: str, speed: float) -> tuple[Floats, Ends]:
        """See AcousticNetwork."""
        ids, last = self._ids_of(piece)
        noise, length, duration_noise = self._files.scales
        inputs = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array([noise, length / speed, duration_noise], np.float32),
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
