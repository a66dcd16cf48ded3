import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from sglang_live.bridge.platform import cpu
from sglang_live.bridge.platform.cpu import (
    place_ranks,
    share_cores,
)


@pytest.mark.parametrize(("n_cores", "n_threads"), [(1, "1"), (2, "1"), (8, "2"), (64, "21")])
def test_engines_that_compute_together_share_the_cores(monkeypatch, n_cores, n_threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "to be restored")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(n_cores))
    share_cores(3)
    assert os.environ["OMP_NUM_THREADS"] == n_threads


def test_a_users_omp_num_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    share_cores(3)
    assert os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(("n_ranks", "bound"), [(1, None), (2, "0|0")])
def test_several_ranks_may_share_a_numa_node(monkeypatch, n_ranks, bound):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "to be restored")
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    place_ranks(n_ranks)
    assert os.environ.get("SGLANG_CPU_OMP_THREADS_BIND") == bound


def states_of_a_runner():
    """How many denormals are left, and the priority, before a runner is initialized and in it."""
    tiny = torch.full((4,), 1e-40)
    states = []

    def look(_=None) -> None:
        states.append(((tiny * 1).count_nonzero().item(), os.nice(0)))

    look()
    cpu.begin_computing_and(look, "a runner")
    return states


def test_threads_that_compute_flush_denormals_and_have_lower_priority():
    """In a process of its own: the rest of the tests is an elsewhere."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        (n_tiny, nice), here = process.submit(states_of_a_runner).result()
    assert n_tiny == 4
    assert here == (0, min(nice + 5, 19))


def test_an_engine_on_a_cpu_can_be_profiled():
    platform = cpu.CpuReferencePlatform()
    name = platform.get_torch_profiler_activity_str()
    assert getattr(torch.profiler.ProfilerActivity, name) == platform.get_torch_profiler_activity()
