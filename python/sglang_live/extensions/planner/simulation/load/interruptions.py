"""Interruptions, drawn before the run: barge-ins, and noises that are none."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_live.extensions.planner.simulation.turn_record import BARGE_IN, FALSE_TRIGGER


@dataclass(frozen=True, slots=True)
class PlannedInterruption:
    """An interruption of a response.

    after_s: time from the response's first packet.
    sound: name of a false trigger's noise. None: a barge-in.
    """

    kind: str
    after_s: float
    sound: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionModel:
    """Shares of interrupted turns, and the distribution of the moment (LiveServe §7.1).

    Attributes:
        barge_in: share of turns with a successor and without a false trigger.
        false_triggers: share of all turns.
        response_durations_s: measured responses; the moment is uniform within one drawn of them.
        sounds: names of noises that are no speech.
    """

    barge_in: float
    false_triggers: float
    response_durations_s: np.ndarray
    sounds: tuple[str, ...]

    def draw(self, rng: np.random.Generator, *, is_last: bool) -> PlannedInterruption | None:
        # Every number is drawn for every turn, so that a larger share only adds interruptions.
        false_trigger, barge_in, share = rng.random(3)
        after_s = float(share * rng.choice(self.response_durations_s))
        sound = str(rng.choice(self.sounds))
        if false_trigger < self.false_triggers:
            return PlannedInterruption(FALSE_TRIGGER, after_s, sound)
        # The last turn has no successor that could interrupt it.
        if barge_in < self.barge_in and not is_last:
            return PlannedInterruption(BARGE_IN, after_s)
        return None


def load_response_durations(path: Path) -> np.ndarray:
    """Load durations in seconds.

    Raises:
        ValueError: if the file is not a list of positive durations.
    """
    try:
        durations_s = np.asarray(json.loads(path.read_text("utf-8"))["durations_s"], dtype=float)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"cannot read response durations from {path}: {error!r}") from error
    if not durations_s.size or durations_s.ndim != 1 or (durations_s <= 0).any():
        raise ValueError(f"{path}: durations_s must be a list of positive numbers")
    return durations_s
