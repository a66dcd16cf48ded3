"""Granules of memory that back KV pools, as runs of shared memory files.

A granule is the smallest piece of memory that can be mapped by itself: a page of the CPU, an
allocation unit of the GPU's virtual memory. All granules are alike: a pool cuts those that it
receives across its layers' buffers, whatever pool had them before.
In: runs. Out: runs. Pure arithmetic.
"""

from collections.abc import Iterable, Sequence

import msgspec


class Run(msgspec.Struct, frozen=True):
    """Adjacent granules of one memory.

    Attributes:
        memory: inode of the shared memory file.
        first: place of the first granule in the file, in granules.
        n: number of granules, at least 1.
    """

    memory: int
    first: int
    n: int

    @property
    def end(self) -> int:
        return self.first + self.n


def count(runs: Iterable[Run]) -> int:
    return sum(run.n for run in runs)


def joined(runs: Iterable[Run]) -> list[Run]:
    """The runs in their order, with adjacent ones joined."""
    out: list[Run] = []
    for run in runs:
        if out and out[-1].memory == run.memory and out[-1].end == run.first:
            last = out[-1]
            out[-1] = Run(last.memory, last.first, last.n + run.n)
        else:
            out.append(run)
    return out


def split(runs: Sequence[Run], n: int) -> tuple[list[Run], list[Run]]:
    """The first n granules, and the others.

    Raises:
        ValueError: there are fewer than n.
    """
    first: list[Run] = []
    for at, run in enumerate(runs):
        if n < run.n:
            rest = [Run(run.memory, run.first + n, run.n - n), *runs[at + 1 :]]
            return ([*first, Run(run.memory, run.first, n)] if n else first), rest
        first.append(run)
        n -= run.n
    if n:
        raise ValueError(f"{n} granules are missing")
    return first, []


def without(runs: Sequence[Run], taken: Sequence[Run]) -> list[Run]:
    """The runs without the granules of `taken`, by memory and place."""
    left = list(runs)
    for hole in taken:
        kept: list[Run] = []
        for run in left:
            if run.memory != hole.memory or hole.end <= run.first or run.end <= hole.first:
                kept.append(run)
                continue
            if run.first < hole.first:
                kept.append(Run(run.memory, run.first, hole.first - run.first))
            if hole.end < run.end:
                kept.append(Run(run.memory, hole.end, run.end - hole.end))
        left = kept
    return left
