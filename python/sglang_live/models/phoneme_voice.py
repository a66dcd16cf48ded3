"""A voice that is a reader of text and an acoustic network: text to phonemes, phonemes to sound.

What hibari, Kokoro and Piper share: limits, pieces that a network takes at once, and the end of
each word.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError
from sglang_live.models.phonemes import Phoneme, TextReader, pieces, word_ends
from sglang_live.models.speech import Speech, SpokenWord
from sglang_live.speakable.style import SpeechStyle

MAX_CHARACTERS = 1000
# What the networks' authors offer.
MIN_SPEED, MAX_SPEED = 0.5, 2.0

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

    def speak(self, piece: Sequence[Phoneme], voice: str, speed: float) -> tuple[Floats, Ends]:
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
    def max_characters(self) -> int:
        return MAX_CHARACTERS

    @property
    def times_words(self) -> bool:
        return self._network.times_phonemes

    def synthesise(self, text: str, voice: str, speed: float = 1.0) -> Speech:
        """Read a text aloud, sentence by sentence.

        Args:
            text: at most MAX_CHARACTERS. What has no pronunciation, such as an emoji or another
                script, makes no sound.
            voice: one of `voices`.
            speed: MIN_SPEED to MAX_SPEED.
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
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise BadInputError(f"Speed {speed}: from {MIN_SPEED} to {MAX_SPEED} can be used.")
        words, sentences = self._reader.read(text)
        waves: list[Floats] = []
        ends: list[tuple[int, float]] = []
        n_samples = 0
        for sentence in sentences:
            for piece in pieces(sentence, self._network.max_phonemes):
                wave, piece_ends = self._network.speak(piece, voice, speed)
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
