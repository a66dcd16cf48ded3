"""Side talk: a voice far softer and duller than the user's turns, as another person in the room.

In: the audio of turns; windows in which there may be a voice. Out: their scores, 0 for side talk.
Owner: one SideTalk per session. Pure. It knows no speaker: another person who is as near sounds as
the user does.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.filters.voice_filter import Found, Frame, Pcm, Scores, VoiceFilter
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.vad import TurnDetection

Floats = npt.NDArray[np.float32]

# Chosen on the recordings `tune` of benchmark.turn_taking: no voice of a user is that far from the
# user's own turns in both.
_SOFTER_DB, _DULLER_DB = 8.0, 1.0
# Windows of a voice that are compared: syllables differ by more than voices do.
_COMPARED = 8
# Fewer are too few: a turn with less voice teaches nothing, either.
_LEAST = 3
_LEAST_LEARNT = 15
# After this many windows without a voice the next one may be another person's.
_FORGOTTEN = 7
# Of a turn, what is within this range of its loudest window is voice.
_RANGE_DB = 20.0
_LEARNT_SAMPLES = 4 * INPUT_RATE_HZ
# The median of several turns, one of which may be another person's. A user who moves is followed.
_TURNS = 3

_HANN = np.hanning(WINDOW_SAMPLES + 1)[:-1].astype(np.float32)
_HZ = np.fft.rfftfreq(WINDOW_SAMPLES, 1 / INPUT_RATE_HZ)
_LOW = slice(*np.searchsorted(_HZ, (100, 1_000)))
_HIGH = slice(*np.searchsorted(_HZ, (2_000, 6_000)))
_TINY = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """
    power: [n] mean square of each window, of full scale.
    tilts_db: [n] energy from 2 to 6 kHz over that from 100 Hz to 1 kHz.
    """

    power: Floats
    tilts_db: Floats


def sound_of(pcm: npt.NDArray[np.int16]) -> Sound:
    """Of the whole windows that end with the audio. pcm: [n] int16, 16 kHz."""
    n = len(pcm) // WINDOW_SAMPLES
    windows = pcm[len(pcm) - n * WINDOW_SAMPLES :].reshape(n, WINDOW_SAMPLES) / np.float32(32768)
    spectrum = np.abs(np.fft.rfft(windows * _HANN, axis=1)) ** 2
    high, low = spectrum[:, _HIGH].sum(axis=1), spectrum[:, _LOW].sum(axis=1)
    power = (windows**2).mean(axis=1)
    tilts = 10 * np.log10((high + _TINY) / (low + _TINY))
    return Sound(power.astype(np.float32), tilts.astype(np.float32))


class SideTalk(VoiceFilter):
    def __init__(self) -> None:
        self._turns: deque[tuple[float, float]] = deque(maxlen=_TURNS)  # level, tilt
        self._heard: deque[tuple[float, float]] = deque(maxlen=_COMPARED)  # power, tilt
        self._silent = 0  # windows since the last voice
        self._n_far = 0  # windows of the voice that were far

    @property
    def is_known(self) -> bool:
        return bool(self._turns)

    def configure(self, detection: TurnDetection) -> bool:
        return detection.ignore_side_talk

    async def filtered(self, frame: Frame, scores: Scores) -> Scores:
        # A user who has moved away is as soft and dull as another person.
        is_compared = frame.over_response and self.is_known and not frame.is_known
        if not is_compared or not len(frame.pcm):
            return scores
        n_before = self._n_far
        scores = self.without_others(scores, frame.threshold, frame.pcm)
        if self._n_far and not n_before:
            frame.found.append(Found("side_talk", "far"))
        return scores

    def learn(self, turn: Pcm) -> None:
        sound = sound_of(turn[-_LEARNT_SAMPLES:])
        if len(sound.power) < _LEAST_LEARNT:
            return
        loud = sound.power >= sound.power.max() * 10 ** (-_RANGE_DB / 10)
        if loud.sum() >= _LEAST_LEARNT and sound.power.max() > _TINY:
            level = _db(float(sound.power[loud].mean()))
            self._turns.append((level, float(np.median(sound.tilts_db[loud]))))

    def without_others(
        self, scores: Floats, threshold: float, pcm: npt.NDArray[np.int16]
    ) -> Floats:
        """The scores, 0 where the voice is another person's.

        Args:
            scores: [n] of speech in consecutive windows. threshold: from which one is a voice.
            pcm: the same windows, int16, 16 kHz.
        """
        is_voice = scores >= threshold
        if not is_voice.any():
            self._wait(len(scores))
            return scores
        own, sound = scores.copy(), sound_of(pcm)
        for at, voice in enumerate(is_voice.tolist()):
            if not voice:
                self._wait(1)
                continue
            self._silent = 0
            self._heard.append((float(sound.power[at]), float(sound.tilts_db[at])))
            if self._is_far():
                own[at] = 0.0
                self._n_far += 1
        return own

    def _wait(self, n_silent: int) -> None:
        self._silent += n_silent
        if self._silent >= _FORGOTTEN:
            self.forget()

    def forget(self) -> None:
        """The next voice is a new one."""
        self._heard.clear()
        self._silent = 0
        self._n_far = 0

    def _is_far(self) -> bool:
        if not self._turns or len(self._heard) < _LEAST:
            return False
        (powers, tilts), (levels, usual) = (
            zip(*self._heard, strict=True),
            zip(*self._turns, strict=True),
        )
        is_soft = _db(float(np.mean(powers))) < np.median(levels) - _SOFTER_DB
        return bool(is_soft and np.median(tilts) < np.median(usual) - _DULLER_DB)


def _db(power: float) -> float:
    return float(10 * np.log10(power + _TINY))
