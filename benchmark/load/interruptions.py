"""When callers interrupt, drawn before anything runs: barge-ins and sounds that are none."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_live.client.turn_record import BARGE_IN, FALSE_TRIGGER


@dataclass(frozen=True, slots=True)
class PlannedInterruption:
    """after_s: from the reply's first packet. sound: of a false trigger, by name."""

    kind: str
    after_s: float
    sound: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionModel:
    """Shares of turns, and what the moment is drawn from (LiveServe §7.1).

    Attributes:
        barge_in: of the turns that another follows and that no false trigger falls on.
        false_triggers: of all turns.
        reply_durations_s: measured replies; the cut lies anywhere within one drawn from them.
        sounds: names of the sounds that are no speech.
    """

    barge_in: float
    false_triggers: float
    reply_durations_s: np.ndarray
    sounds: tuple[str, ...]

    def draw(self, rng: np.random.Generator, *, is_last: bool) -> PlannedInterruption | None:
        # Every number is drawn for every turn, so that a larger share only adds interruptions.
        false_trigger, barge_in, share = rng.random(3)
        after_s = float(share * rng.choice(self.reply_durations_s))
        sound = str(rng.choice(self.sounds))
        if false_trigger < self.false_triggers:
            return PlannedInterruption(FALSE_TRIGGER, after_s, sound)
        # Nothing is said after the last turn that could interrupt it.
        if barge_in < self.barge_in and not is_last:
            return PlannedInterruption(BARGE_IN, after_s)
        return None


def load_reply_durations(path: Path) -> np.ndarray:
    """Raises ValueError if the file is not a list of positive durations."""
    try:
        durations_s = np.asarray(json.loads(path.read_text())["durations_s"], dtype=float)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"cannot read reply durations from {path}: {error!r}") from error
    if not durations_s.size or durations_s.ndim != 1 or (durations_s <= 0).any():
        raise ValueError(f"{path}: durations_s must be a list of positive numbers")
    return durations_s
