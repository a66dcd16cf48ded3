"""A host that is not quiet: pauses in which no stage computes."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.extensions.planner.simulation.events import Device, Events


@dataclass(frozen=True, slots=True)
class Noise:
    """
    every_s: mean time between two pauses, which come independently of each other.
    least_s, most_s: of a pause, drawn evenly.
    """

    every_s: float
    least_s: float = 0.02
    most_s: float = 0.2

    def __post_init__(self) -> None:
        if not (self.every_s > 0 and 0 <= self.least_s <= self.most_s):
            raise ValueError("a time between pauses is positive, and so is a pause")

    def begin(
        self, events: Events, devices: list[Device], seed: int, is_over: Callable[[], bool]
    ) -> None:
        """Draw pauses of all devices until is_over."""
        rng = random.Random(seed)

        def pause() -> None:
            for_s = rng.uniform(self.least_s, self.most_s)
            for device in devices:
                device.stall(for_s)
            if not is_over():
                events.after(rng.expovariate(1 / self.every_s), pause)

        events.after(rng.expovariate(1 / self.every_s), pause)
