"""What is annotated in a recording, and what a component decided while it heard it.

Times are milliseconds of the recording, which is audio received.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sglang_live.core import INPUT_RATE_HZ

SAMPLES_PER_MS = INPUT_RATE_HZ // 1000


@dataclass(frozen=True, slots=True)
class Span:
    start_ms: float
    end_ms: float

    @property
    def lasts_ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True)
class Turn:
    """
    end_ms: end of the last word.
    pauses: silences between the words.
    until_ms: how long the end may be noticed: the next turn's start, or the recording's end.
    ends: False: the recording was cut within the turn, so that only its pauses count.
    """

    start_ms: float
    end_ms: float
    until_ms: float
    pauses: tuple[Span, ...] = ()
    ends: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Turns of one user with silence after each, which is where the agent would speak.

    group: speaker or meeting; recordings of a group are in the same split.
    source: kind of recording, for figures apart.
    pcm: [n] int16, 16 kHz.
    """

    name: str
    group: str
    source: str
    pcm: np.ndarray
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stimulus:
    """What the microphone hears while the agent speaks.

    kind: what it is, for figures apart.
    pcm: [n] int16, 16 kHz, of the microphone.
    playing: [n] int16, what the agent plays at the same time; None: it is not in the microphone.
    onset_ms: where the user's sound begins; 0 for the agent's sound alone.
    earlier: [n] int16, a turn of the session's user before; None: there was none.
    """

    name: str
    group: str
    kind: str
    pcm: np.ndarray
    onset_ms: float
    playing: np.ndarray | None = None
    earlier: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """
    kind: `ended`, the user's turn is over; `held`, the agent's audio is kept back for a suspected
        voice; `released`, it is sent again; `stopped`, the agent was interrupted.
    at_ms: when it was taken: audio received so far, and the time that a model computes.
    """

    kind: Literal["ended", "held", "released", "stopped"]
    at_ms: float
