"""The journal's cost is measured of real calls, in virtual time."""

import json
import time

from benchmark.journal_cost import main


def test_calls_are_held_with_and_without_a_journal(tmp_path):
    path, before_s = tmp_path / "out.json", time.monotonic()
    flags = ["--sessions", "2", "--turns", "1", "--rounds", "1", "--json", str(path)]
    assert main(flags) == 0
    found = json.loads(path.read_text())
    without, journal = found["arms"]
    assert without["cpu_ms"][0] > 0 and without["n_events"] == journal["n_events"]
    assert without["writes"] == without["records"] == [0]
    # The user's item, first words, progress and the end of each turn, and moments of silence.
    assert 5 <= journal["writes"][0] <= 11
    assert journal["kilobytes"][0] > 10
    assert found["cost_ms"] == [round(journal["cpu_ms"][0] - without["cpu_ms"][0], 4)]
    assert 0 < time.monotonic() - before_s < 3600, "the clock is the machine's again"
