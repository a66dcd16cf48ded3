"""The benchmark of batches runs all lines and measures them."""

from benchmark.batch_lines import LoopDelay, measure


async def test_all_lines_run_and_are_measured(tmp_path):
    found = await measure(200, tmp_path)
    assert found["lines"] == 200 and found["lines_per_s"] > 0 and found["database_mib"] > 0
    delays = [value for name, value in found.items() if name.endswith("delay_ms")]
    assert len(delays) == 3 and all(delay["p50"] <= delay["max"] for delay in delays)


def test_delays_are_summed_up_and_begin_anew():
    delay = LoopDelay()
    delay.seen_s = [0.001, 0.003, 0.002]
    assert delay.summary() == {"p50": 2.0, "p99": 2.0, "max": 3.0}
    assert delay.seen_s == []
