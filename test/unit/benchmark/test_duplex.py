"""Calls on a modelled device: what bounds their number."""

import pytest

from benchmark.duplex import CALLS, MODEL, WINDOWS, Costs, simulate


@pytest.fixture(scope="module")
def costs() -> Costs:
    return Costs.load(MODEL)


def test_a_call_alone_waits_for_a_tick_and_for_its_own_step(costs):
    row = simulate(costs, "context", 1, 20.0, seed=1)
    step_ms = 1000 * costs.tick_s(1, WINDOWS["context"] + 64)
    assert step_ms < row.p50_ms < row.p99_ms < step_ms + 40
    assert (row.missed, row.fits) == (0.0, True)


def test_memory_and_time_bound_the_calls_and_a_window_moves_both(costs):
    most = {}
    for window in WINDOWS:
        rows = [simulate(costs, window, n, 10.0, seed=1) for n in CALLS]
        most[window] = max(row.n_calls for row in rows if row.fits and row.missed < 0.01)
        missed = [row.missed for row in rows]
        assert missed[0] == 0.0 and missed[-1] > 0.9
    assert 30 <= most["context"] <= costs.most_calls(WINDOWS["context"]) < 40
    assert 100 <= most["minute"] <= costs.most_calls(WINDOWS["minute"]) < 140
