"""Runs of granules are cut and joined without losing any."""

import random

import pytest

from sglang_live.extensions.elastic.granules import Run, count, joined, split, without


def places(runs) -> list[tuple[int, int]]:
    return [(run.memory, run.first + at) for run in runs for at in range(run.n)]


def random_runs(rng: random.Random, n_runs: int) -> list[Run]:
    """Runs without common granules."""
    first, runs = 0, []
    for _ in range(n_runs):
        first += rng.randrange(3)
        runs.append(Run(rng.randrange(2), first, rng.randrange(1, 6)))
        first += runs[-1].n
    rng.shuffle(runs)
    return runs


def test_a_split_keeps_every_granule_in_order():
    rng = random.Random(1)
    for _ in range(300):
        runs = random_runs(rng, rng.randrange(6))
        n = rng.randrange(count(runs) + 1)
        first, rest = split(runs, n)
        assert count(first) == n
        assert places(first) + places(rest) == places(runs)
        assert all(run.n > 0 for run in (*first, *rest))


def test_a_split_beyond_the_end_is_refused():
    with pytest.raises(ValueError, match="2 granules are missing"):
        split([Run(1, 0, 3)], 5)


def test_joined_runs_are_the_same_granules_in_fewer_runs():
    rng = random.Random(2)
    for _ in range(300):
        runs = random_runs(rng, rng.randrange(6))
        pieces = [piece for run in runs for piece in split([run], rng.randrange(run.n))]
        flat = [run for piece in pieces for run in piece]
        assert places(joined(flat)) == places(runs)
        assert len(joined(flat)) <= len(runs)
    assert joined([Run(1, 0, 2), Run(1, 2, 3), Run(2, 5, 1)]) == [Run(1, 0, 5), Run(2, 5, 1)]


def test_without_removes_exactly_the_taken_granules():
    rng = random.Random(3)
    for _ in range(300):
        runs = random_runs(rng, rng.randrange(6))
        taken = [Run(rng.randrange(2), rng.randrange(20), rng.randrange(1, 8)) for _ in range(3)]
        gone = set(places(taken))
        assert places(without(runs, taken)) == [one for one in places(runs) if one not in gone]
