"""The README's figures come from result documents alone."""

import json

from benchmark.summary import newest, section


def write(folder, name: str, **document) -> None:
    (folder / name).write_text(json.dumps(document))


def test_nothing_is_claimed_without_results(tmp_path):
    assert section(tmp_path) == "Nothing has been measured yet."


def test_the_newest_document_of_a_benchmark_counts(tmp_path):
    write(tmp_path, "turn_cost_a.json", date="2026-01-02", overhead_of_all=0.2)
    write(tmp_path, "turn_cost_b.json", date="2026-01-03", overhead_of_all=0.1)
    write(tmp_path, "other_c.json", date="2026-01-04", overhead_of_all=0.9)
    assert newest(tmp_path, "turn_cost")["overhead_of_all"] == 0.1
    assert "10.0 % of a turn" in section(tmp_path)


def test_what_was_not_measured_often_enough_is_not_printed_as_a_number(tmp_path):
    few = {"p50": None, "p90": None, "n": 3}
    point = {
        "sessions": 1,
        "policies": "off",
        "ttfp_ms": few,
        "ttfp_after_detection_ms": few,
        "rtf": few,
        "continuity": 1.0,
        "peak_rss_mib": 4000.0,
    }
    write(
        tmp_path,
        "voice_load_cpu.json",
        date="2026-01-01",
        device="cpu",
        git_commit="0123456789ab",
        points=[point],
        runs=[{"server_start_s": 20.0}],
    )
    assert "| TTFP, 1 caller, policies off | P50 n/a, P90 n/a, n 3 |" in section(tmp_path)


def test_barge_ins_show_how_fast_the_reply_stopped_and_what_was_wasted(tmp_path):
    few = {"p50": None, "p90": None, "p95": None, "n": 3}
    point = {
        "sessions": 4,
        "policies": "all",
        "ttfp_ms": few,
        "ttfp_after_detection_ms": few,
        "rtf": few,
        "continuity": None,
        "barge_ins": 30,
        "stop_latency_ms": {"p50": 120.4, "p90": 160.0, "p95": 180.0, "n": 28},
        "waste": 0.061,
        "peak_rss_mib": 4000.0,
    }
    write(
        tmp_path,
        "voice_load_cpu.json",
        date="2026-01-01",
        device="cpu",
        git_commit="0123456789ab",
        points=[point],
        runs=[{"server_start_s": 20.0}],
    )
    text = section(tmp_path)
    assert "| stop latency after a barge-in, 4 callers | P50 120 ms, P95 180 ms, n 28 |" in text
    assert "| waste at 30 barge-ins, 4 callers | 6.1 % |" in text
    assert "| turns without a gap over 100 ms, 4 callers | n/a |" in text
