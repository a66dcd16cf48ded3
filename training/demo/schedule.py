"""Common parts of all trainings: seeds, learning rate, shares of a batch, log, resumable steps."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

_EVERY = 100
_SAVED_EVERY = 500
_SEEDS_APART = 1_000_003


def cosine(step: int, steps: int, warm_up: int, last: float = 0.03) -> float:
    """Factor of the learning rate: rises over `warm_up` steps, falls to `last` along a cosine."""
    down = last + (1 - last) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / warm_up) * down


def step_generator(seed: int, step: int) -> torch.Generator:
    """A generator whose draws depend only on the seed and the step."""
    return torch.Generator().manual_seed(seed + _SEEDS_APART * step)


class Shares:
    """A batch in two halves, each with draws of its own, computed on torch's number of threads.

    The number of threads does not change the result.
    """

    N = 2

    def __init__(self) -> None:
        # Small operations gain little from threads inside them.
        self._threads = ThreadPoolExecutor(
            min(self.N, torch.get_num_threads()),
            initializer=torch.set_num_threads,
            initargs=(1,),
        )

    def gradients(
        self,
        parameters: list[nn.Parameter],
        loss_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Set every parameter's gradient to the mean of the shares' gradients.

        Args:
            loss_of: number of a share -> its loss, and its share of right predictions.
        Returns:
            The means of both.
        """

        def work(share: int):
            loss, right = loss_of(share)
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            return loss.detach(), right.float(), found

        losses, rights, found = zip(*self._threads.map(work, range(self.N)), strict=True)
        for parameter, *slopes in zip(parameters, *found, strict=True):
            slopes = [slope for slope in slopes if slope is not None]
            parameter.grad = sum(slopes) / self.N if slopes else None
        return sum(losses) / self.N, sum(rights) / self.N


@dataclass(slots=True)
class Log:
    """Prints the means of its values every hundred steps."""

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


@dataclass(slots=True)
class ResumableSteps:
    """The steps of a training, which resumes at its last saved step when it is started again.

    path: the file of the saved state. None: nothing is saved.
    """

    path: Path | None = None

    def steps(
        self,
        n: int,
        module: nn.Module,
        optimiser: torch.optim.Optimizer,
    ) -> Iterator[int]:
        """Numbers of the remaining steps.

        If draws depend only on the step (`step_generator`), a stopped training ends with the
        weights of an unstopped one.
        """
        begin = 0
        if self.path and self.path.exists():
            state = torch.load(self.path, weights_only=True)
            begin = state["step"]
            module.load_state_dict(state["module"])
            optimiser.load_state_dict(state["optimiser"])
        for step in range(begin, n):
            yield step
            if self.path and (step + 1) % _SAVED_EVERY == 0 and step + 1 < n:
                self._save(step + 1, module, optimiser)
        if self.path:
            self.path.unlink(missing_ok=True)

    def _save(self, step: int, module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        state = {
            "step": step,
            "module": module.state_dict(),
            "optimiser": optimiser.state_dict(),
        }
        part = self.path.with_suffix(".saving")
        torch.save(state, part)
        part.replace(self.path)
