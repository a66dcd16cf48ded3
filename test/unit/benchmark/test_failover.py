"""Claims about the figures of benchmark.failover."""

import pytest

from benchmark.failover.__main__ import main
from benchmark.failover.listener import Came, longest_silence_s, longest_wait_s
from benchmark.failover.losses import Row
from benchmark.failover.report import figures_of, loss_lines

STEADY = [Came(0.1 * n, 0.1) for n in range(20)]


def row(arm: str, moved: int, audio_ms: float, text_ms: float | None = None) -> Row:
    return Row(arm, busy=0.0, moved=moved, text_ms=text_ms, audio_ms=audio_ms, silent_ms=0.0)


def test_a_wait_counts_from_the_loss_and_ends_with_what_is_watched():
    came = [Came(at_s) for at_s in (0.5, 1.0, 1.2, 1.9, 4.0)]
    assert longest_wait_s(came, 0.9, 2.0) == pytest.approx(0.7)
    assert longest_wait_s(came, 0.9, 1.3) == pytest.approx(0.2)
    assert longest_wait_s(came, 2.0, 3.0) is None


def test_audio_that_comes_before_it_is_needed_leaves_no_silence():
    assert longest_silence_s(STEADY, 9.0) == pytest.approx(0.0)
    late = [*STEADY[:10], *(Came(one.at_s + 0.4, 0.1) for one in STEADY[10:])]
    assert longest_silence_s(late, 9.0) == pytest.approx(0.4)
    assert longest_silence_s(late, 0.9) == pytest.approx(0.0)
    ahead = [Came(0.0, 0.5), *late]
    assert longest_silence_s(ahead, 9.0) == pytest.approx(0.0)


def test_a_kill_that_hit_no_job_is_in_no_median():
    rows = [row("talker", 1, 200.0), row("talker", 0, 1.0), row("talker", 1, 400.0)]
    [entry] = figures_of(rows)
    assert (entry["n"], entry["without_effect"]) == (2, 1)
    assert entry["audio_ms"] == {"p50": 300.0, "p90": 380.0, "max": 400.0}
    assert entry["text_ms"] is None


def test_an_undisturbed_response_counts_though_nothing_moved():
    [entry] = figures_of([row("undisturbed", 0, 50.0, text_ms=20.0)])
    assert entry["n"] == 1 and entry["text_ms"]["p50"] == 20.0


@pytest.mark.parametrize("flags", [["--arms", "thinker,ear"], ["--n", "0"], ["--buffered-s", "0"]])
def test_wrong_flags_are_refused_before_anything_starts(flags, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert "error" in capsys.readouterr().err


def test_the_lines_of_a_document_name_what_was_lost_and_what_failed():
    rows = [row("talker", 1, 200.0), row("undisturbed", 0, 50.0)]
    document = {
        "figures": figures_of(rows),
        "drains": {"drained_ms": [6000, 8000], "turns": {"completed": 9, "failed": 1}},
        "first_audio_ms": {"own": [100.0, 110.0, 90.0], "hosts": [102.0, 113.0, 91.0]},
    }
    killed, drained, paths = loss_lines(document).values()
    assert killed[1].startswith("talker 200 / 200 ms, undisturbed 50 / 50 ms, talker silent")
    assert drained[1] == "7000 / 7800 ms; 1 of 10 turns failed"
    apart = "hosts - own 2.0 ms (1.0 to 3.0)"
    assert paths[1] == f"own 100 / 108 ms, hosts 102 / 110.8 ms, {apart}"
    assert loss_lines({"figures": [], "drains": None, "first_audio_ms": {}}) == {}
