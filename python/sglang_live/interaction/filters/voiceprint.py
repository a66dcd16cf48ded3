"""Whether a voice over a response is that of the session's user, by embeddings of both.

In: audio of the user's turns; windows of a voice; embeddings of both. Out: which windows belong to
another person, and how long a voice must last before that is known.
Owner: one Voiceprint and one HeardVoice per session. Pure: the owner has the embeddings computed.

An embedding changes with the length of what it is computed from, more than with the words. So a
voice is compared with the beginnings of the user's turns that are as long as it is so far.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.silero import WINDOW_SAMPLES

Floats = npt.NDArray[np.float32]
Pcm = npt.NDArray[np.int16]
State = Literal["unsure", "near", "far"]

WINDOW_MS = 1000 * WINDOW_SAMPLES // INPUT_RATE_HZ

# Number of windows at which a voice is compared, with the similarity below which it is another
# person's, and that from which it is the user's. At _DECIDED the first counts for both.
# Chosen on the recordings `tune` of benchmark.turn_taking.
_BOUNDS = {
    8: (0.64, 0.79),
    12: (0.58, 0.74),
    15: (0.56, 0.70),
    22: (0.60, 0.60),
    30: (0.54, 0.60),
    50: (0.52, 0.58),
}
LENGTHS = tuple(_BOUNDS)
# Similarity of a whole turn, below which it is another person's.
_LEAST_OF_TURN = 0.58
_CERTAIN, _DECIDED, _LONGEST = 15, 22, max(LENGTHS)
# A voice that goes on is compared again after this many windows, by its last _LONGEST.
AGAIN = 16
# After this many windows without a voice the next one may be another person's; after a voice that
# was, only after more, because a television pauses, too.
_FORGOTTEN, _FAR_FORGOTTEN = 7, 47

# Of a turn, what is within this range of its loudest window is voice.
_RANGE_DB = 20.0
_LEAST_LEARNT, _MOST_LEARNT = 30, 125
_LEARNT_EVERY = 8
# A turn is learnt a second time as by telephone, so that a user may change the microphone.
_NARROW_HZ = 300.0, 3400.0
_VARIANTS = 2
# The user is heard in two of these turns, so that one by another person changes nothing.
_TURNS = 5


class SpeakerModel(Protocol):
    def embed(self, sounds: Sequence[Pcm], lengths: Sequence[int] = ()) -> Floats:
        """Embeddings of voices, which differ less within a speaker than between speakers.

        Args:
            sounds: of one length, each [n] int16 at INPUT_RATE_HZ.
            lengths: in samples, at most n: embeddings of the sounds' beginnings; (): of all of it.
        Returns:
            [n_lengths, n_sounds, width], each of length 1, after milliseconds. May be called from
            any thread.
        """
        ...


class Voiceprint:
    """How the user's last turns sounded."""

    def __init__(self, turns: Iterable[dict[int, Floats]] = ()) -> None:
        self._turns = deque(turns, maxlen=_TURNS)

    @property
    def is_known(self) -> bool:
        return bool(self._turns)

    def copy(self) -> "Voiceprint":
        return Voiceprint(self._turns)

    def learn(self, embeddings: Floats) -> None:
        """From a turn: [n_lengths, n_parts, width], as of `parts_of`."""
        self._turns.append(dict(zip(LENGTHS, _directions(embeddings), strict=False)))

    def is_of_user(self, embeddings: Floats) -> bool:
        """Whether a turn is the user's, as far as that is known; the same embeddings."""
        n = len(embeddings)
        similarity = self.similarity(LENGTHS[n - 1], _directions(embeddings)[-1, 0]) if n else None
        return similarity is None or similarity >= _LEAST_OF_TURN

    @property
    def longest(self) -> int:
        """The longest of LENGTHS that can be compared; 0: none."""
        return max((max(turn) for turn in self._turns), default=0)

    def similarity(self, n_windows: int, embedding: Floats) -> float | None:
        """The cosine with the second most similar turn, of two or less with the most similar.

        Args:
            n_windows: one of LENGTHS, of the audio of the embedding.
        Returns:
            None if no turn was as long.
        """
        turns = [turn[n_windows] for turn in self._turns if n_windows in turn]
        similar = sorted((float((each @ embedding).max()) for each in turns), reverse=True)
        return similar[1 if len(similar) > 2 else 0] if similar else None


def _directions(embeddings: Floats) -> Floats:
    """[n_lengths, _VARIANTS, width] of [n_lengths, n_parts, width]."""
    n_lengths, _, width = embeddings.shape
    means = embeddings.reshape(n_lengths, _VARIANTS, -1, width).mean(axis=2)
    directions: Floats = means / np.maximum(np.linalg.norm(means, axis=2, keepdims=True), 1e-9)
    return directions


def _narrow(voice: Pcm) -> Pcm:
    """The voice as a telephone transmits it."""
    spectrum = np.fft.rfft(voice.astype(np.float32))
    hz = np.fft.rfftfreq(len(voice), 1 / INPUT_RATE_HZ)
    spectrum[(hz < _NARROW_HZ[0]) | (hz > _NARROW_HZ[1])] = 0
    return np.fft.irfft(spectrum, len(voice)).clip(-32_768, 32_767).astype(np.int16)


def parts_of(turn: Pcm) -> tuple[list[Pcm], list[int]]:
    """What is to be embedded of a turn, and the lengths in samples at which it is.

    Returns:
        Parts of one length, then the same as by telephone; none if there is too little voice.
    """
    n = len(turn) // WINDOW_SAMPLES
    windows = turn[: n * WINDOW_SAMPLES].reshape(n, WINDOW_SAMPLES)
    power = (windows.astype(np.float32) ** 2).mean(axis=1)
    loud = power >= max(power.max(initial=0.0) * 10 ** (-_RANGE_DB / 10), 1.0)
    voice = windows[loud][-_MOST_LEARNT:].reshape(-1)
    n = len(voice) // WINDOW_SAMPLES
    if n < _LEAST_LEARNT:
        return [], []
    lengths = [length * WINDOW_SAMPLES for length in LENGTHS if length <= n]
    starts = range(0, len(voice) - lengths[-1] + 1, _LEARNT_EVERY * WINDOW_SAMPLES)
    variants = voice, _narrow(voice)
    return [each[at : at + lengths[-1]] for each in variants for at in starts], lengths


class HeardVoice:
    """A voice over a response, as far as it is heard.

    state: `unsure` until it is compared.
    stricter: how much more similar than by _BOUNDS a voice must be, for measuring.
    """

    def __init__(self, stricter: float = 0.0) -> None:
        self._stricter = stricter
        self._windows: deque[Pcm] = deque(maxlen=_LONGEST)
        self._n = 0  # windows of the voice
        self._compared = 0  # of these, when it was last due
        self._length = 0  # windows that were due
        self._silent = 0  # windows since the last voice
        self.state: State = "unsure"

    @property
    def is_certain(self) -> bool:
        """Whether the voice is near by more than its first sounds."""
        return self.state == "near" and self._length >= _CERTAIN

    @property
    def voiced_ms(self) -> int:
        """Length of the present voice."""
        return self._n * WINDOW_MS

    def forget(self) -> None:
        """The next voice is a new one."""
        self._end_voice()
        self._silent = 0
        self.state = "unsure"

    @property
    def outlast_ms(self) -> int:
        """Voice that must be heard before it is a turn; 0: what there is is enough."""
        return _DECIDED * WINDOW_MS if self.state == "unsure" and self._n < _DECIDED else 0

    def hear(self, windows: Iterable[Pcm], is_voice: Iterable[bool]) -> None:
        """The next windows, each [WINDOW_SAMPLES]."""
        for window, voiced in zip(windows, is_voice, strict=True):
            if voiced:
                self._windows.append(window)
                self._n += 1
                self._silent = 0
                continue
            self._silent += 1
            if self._silent == _FORGOTTEN:
                self._end_voice()
                if self.state == "near":
                    self.state = "unsure"
            elif self._silent == _FAR_FORGOTTEN:
                self.state = "unsure"

    def due(self, known: int) -> Pcm | None:
        """What is to be embedded now; None: nothing new would be known.

        Args:
            known: longest of LENGTHS that can be compared; 0: none.
        """
        reached = max((each for each in LENGTHS if each <= min(self._n, known)), default=0)
        if reached == known and self._n >= self._compared + AGAIN:
            self._compared = self._n
        elif reached > self._compared:
            self._compared = reached
        else:
            return None
        self._length = reached
        return np.concatenate(list(self._windows)[-reached:]) if reached else None

    def compared(self, similarity: float | None) -> None:
        """The similarity of what was due. None: not known, so that an unsure voice is believed."""
        if similarity is None:
            self.state = "near" if self.state == "unsure" else self.state
            return
        far, near = _BOUNDS[self._length]
        if similarity >= near + self._stricter:
            self.state = "near"
        elif similarity < far + self._stricter:
            self.state = "far"

    def _end_voice(self) -> None:
        self._windows.clear()
        self._n = 0
        self._compared = 0
        self._length = 0
