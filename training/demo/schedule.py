"""What all trainings share: seeds, a learning rate's course, shares of a batch, a log, going on."""

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
    """Factor of the learning rate: up in `warm_up` steps, then down to `last` along a cosine."""
    down = last + (1 - last) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / warm_up) * down


def drawing(seed: int, step: int) -> torch.Generator:
    """What is drawn in this step, whatever was drawn before it."""
    return torch.Generator().manual_seed(seed + _SEEDS_APART * step)


class Shares:
    """A batch as two halves, each with draws of its own, computed by as many threads as there are.

    The number of threads does not change the result.
    """

    N = 2

    def __init__(self) -> None:
        # Small operations gain little from threads within.
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
        """Every parameter gets the mean of the shares' gradients.

        loss_of: number of a share -> its loss, and the part of it that the model gets right.
        Returns the means of both.
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


@dataclass(slots=True)
class Course:
    """The steps of a training, which goes on where it was when it is started again.

    path: a file for what is needed for that; None: begin anew each time.
    """

    path: Path | None = None

    def steps(
        self,
        n: int,
        module: nn.Module,
        optimiser: torch.optim.Optimizer,
    ) -> Iterator[int]:
        """Numbers of the steps that are left.

        Where what is drawn depends on the step alone (`drawing`), a training that was stopped ends
        where one that was not would have.
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
