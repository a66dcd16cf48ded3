"""What all trainings share: seeds, a learning rate's course, a log."""

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch

_EVERY = 100


def seeded(seed: int) -> torch.Generator:
    """Also seeds the initialisation of modules, which draws from the global generator."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def cosine(step: int, steps: int, warm_up: int, last: float = 0.03) -> float:
    """Factor of the learning rate: up in `warm_up` steps, then down to `last` along a cosine."""
    down = last + (1 - last) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / warm_up) * down


@dataclass(slots=True)
class Log:
    """Prints means of what it is told, every hundred steps."""

    name: str
    _started: float = field(default_factory=time.monotonic)
    _values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, step: int, **values: torch.Tensor) -> None:
        for key, value in values.items():
            self._values[key].append(float(value.detach()))
        if (step + 1) % _EVERY == 0:
            means = "  ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in self._values.items())
            print(
                f"{self.name} {step + 1}: {time.monotonic() - self._started:.0f} s  {means}",
                flush=True,
            )
            self._values.clear()
