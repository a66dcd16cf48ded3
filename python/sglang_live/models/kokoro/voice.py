"""Kokoro through onnxruntime: phonemes and a style to a waveform.

In: text. Out: int16 at 24 kHz, and the end of each word, from the network's durations where its
file exports them. The phonemes are those of hibari's reader, which has Kokoro's alphabet.
Source: Kokoro-82M; StyleTTS 2, arXiv:2306.07691.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from sglang_live.models.hibari.reading import EnglishReader, english_alphabet
from sglang_live.models.kokoro.files import Styles, kokoro_files
from sglang_live.models.onnx_model import open_onnx
from sglang_live.models.packages.code import import_fetched
from sglang_live.models.phoneme_voice import Ends, Floats, PhonemeVoice
from sglang_live.models.phonemes import Phoneme
from sglang_live.models.word_times import ends_from_durations, estimated_ends

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
        styles = files.styles()
        alphabet = files.alphabet or english_alphabet(english)
        session = open_onnx(files.model, ("style", "speed"), n_threads)
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

    def speak(self, piece: Sequence[Phoneme], voice: str, speed: float) -> tuple[Floats, Ends]:
        """See AcousticNetwork."""
        ids = [0, *(self._alphabet[phoneme.sign] for phoneme in piece), 0]
        styles = self._styles[voice]
        inputs = {
            self._ids: np.array([ids], np.int64),
            # The style of a voice depends on the number of phonemes.
            "style": styles[min(len(piece), len(styles)) - 1][None],
            "speed": np.array([speed], self._speed_type),
        }
        found, *durations = self._session.run(self._outputs, inputs)
        wave: Floats = found.reshape(-1)
        if durations:
            return wave, ends_from_durations(durations[0], len(wave))[1:-1]
        return wave, estimated_ends(piece, wave)
