"""The README's figures come from result documents alone."""

import json

from benchmark.summary import newest, section


def write(folder, name: str, **document) -> None:
    (folder / name).write_text(json.dumps(document))


def test_nothing_is_claimed_without_results(tmp_path):
    assert section(tmp_path) == "Nothing has been measured yet."


def test_the_newest_document_of_a_benchmark_counts(tmp_path):
    write(tmp_path, "turn_cost_a.json", date="2026-01-02", device="cpu", overhead_of_all=0.2)
    write(tmp_path, "turn_cost_b.json", date="2026-01-03", device="cpu", overhead_of_all=0.1)
    write(tmp_path, "other_c.json", date="2026-01-04", overhead_of_all=0.9)
    assert newest(tmp_path, "turn_cost")["overhead_of_all"] == 0.1
    assert "10.0 % of a turn" in section(tmp_path)


def turn(start_s: float) -> dict:
    """Three seconds of speech, an answer after one, early by two of its four."""
    return {
        "start_s": start_s,
        "end_s": start_s + 6.0,
        "user_audio_s": 3.0,
        "ttfp_ms": 1000.0,
        "audio_s": 4.0,
        "gaps_ms": [],
        "cut_short": False,
    }


def load(date: str, config: dict, **point) -> dict:
    few = {"p50": None, "p90": None, "n": 3}
    point = {
        "sessions": 4,
        "policies": "all",
        "ttfp_after_detection_ms": few,
        "continuity": None,
        "waste": None,
        "failed": 0,
        "late_frames": 0.021,
        "peak_rss_mib": 4000.0,
        **point,
    }
    return {
        "date": date,
        "device": "cpu",
        "git_commit": "0123456789ab",
        "config": {"policies": ["off", "all"], **config},
        "points": [point],
        "runs": [
            {
                "policies": "all",
                "sessions": 4,
                "server_start_s": 20.0,
                "turns": [turn(0.0), turn(4.0)],
            }
        ],
    }


def test_what_was_not_measured_often_enough_is_not_printed_as_a_number(tmp_path):
    write(tmp_path, "voice_load_cpu.json", **load("2026-01-01", {}))
    assert "| 4 | `all` | n/a / n/a | n/a | n/a | n/a | 0.17 | 3 | 0 | 2.1 % |" in section(tmp_path)


def test_every_kind_of_load_has_its_newest_table(tmp_path):
    barge_in = {"barge_in": 0.5}
    arms = {"barge_in": 0.5, "policies": ["off", "urgency", "all"]}
    write(tmp_path, "voice_load_a.json", **load("2026-01-01", barge_in, waste=0.5))
    write(tmp_path, "voice_load_b.json", **load("2026-01-02", barge_in, waste=0.061))
    storm = {"sessions": 4, "period_s": 10.0, "clip_s": 30.0}
    write(tmp_path, "voice_load_c.json", **load("2026-01-01", {"storm": storm}))
    write(tmp_path, "voice_load_d.json", **load("2026-01-01", arms))
    text = section(tmp_path)
    assert "Interruptions with probability 0.5 (cpu, commit 012345678):" in text
    assert "Storms: 4 messages of 30 s every 10 s beside the callers" in text
    assert "What brings what: interruptions with probability 0.5" in text
    assert "| 6.1 % |" in text and "50.0 %" not in text


def test_one_table_has_all_numbers_of_callers_of_a_kind(tmp_path):
    few = load("2026-01-01", {}, continuity=0.99)
    many = load("2026-01-02", {}, sessions=12, stop_latency_ms={"p95": 161.2})
    many["runs"][0]["sessions"] = 12
    again = load("2026-01-03", {}, continuity=0.5)
    again["git_commit"] = "fedcba987654"
    write(tmp_path, "voice_load_a.json", **few)
    write(tmp_path, "voice_load_b.json", **many)
    write(tmp_path, "voice_load_c.json", **again)
    text = section(tmp_path)
    assert (
        text.count("Conversations without interruptions (cpu, commit fedcba987, 012345678):") == 1
    )
    assert text.index("| 4 | `all` | n/a / n/a | 50.0 % |") < text.index("| 12 | `all` |")
    assert "| 161 ms |" in text and "99.0 %" not in text


def test_another_model_has_a_table_of_its_own(tmp_path):
    write(tmp_path, "voice_load_a.json", **load("1", {"model_path": "demo-random"}))
    write(tmp_path, "voice_load_b.json", **load("2", {"model_path": "demo"}))
    text = section(tmp_path)
    assert "Conversations without interruptions (" in text
    assert "Conversations without interruptions, with the model `demo` (" in text


def test_shares_and_times_are_rounded(tmp_path):
    own = {"p50": 268.4, "p90": 739.2, "n": 36}
    document = load("2026-01-01", {}, ttfp_after_detection_ms=own, continuity=0.958)
    write(tmp_path, "voice_load_cpu.json", **document)
    assert "| 4 | `all` | 268 / 739 ms | 95.8 % | n/a | n/a | 0.17 | 36 | 0 | 2.1 % |" in section(
        tmp_path
    )


def test_kv_under_pressure_is_told_by_arm_over_all_repeats(tmp_path):
    rows = [
        {
            "arm": arm,
            "repeat": repeat,
            "ttft_all_ms": [10.0 * repeat + ms for ms in range(60)],
            "recomputed_tokens": 0,
            "loads": 2,
            "reload_s": 0.02,
            "tokens_preloaded": early,
            "tokens_loaded": late,
        }
        for repeat in range(2)
        for arm, early, late in (("lru", 0, 50), ("preload", 95, 5))
    ]
    facts = {"date": "2026-01-02", "device": "cpu", "git_commit": "0123456789ab"}
    write(
        tmp_path,
        "kv_pressure_a.json",
        config={"sessions": 24, "link": "0.02:200"},
        rows=rows,
        **facts,
    )
    text = section(tmp_path)
    assert "| `preload` | 34 / 58 / 68 ms | 0 tokens | 4 | 40 ms | 95.0 % | 120 |" in text
    assert "| `lru` |" in text and "| 0.0 % | 120 |" in text
    assert "24, a modelled link to host memory of 0.02 GB/s and 200 us (cpu" in text


def test_bounds_and_choices_are_told_in_a_row_each(tmp_path):
    age = {"tokens_talked": 6000, "turn_ms": 20.0}
    rows = [
        {"arm": "everything", "cut_ms": 0.0, "ages": [{**age, "kv_tokens_per_call": 6000.0}]},
        {"arm": "bounded", "cut_ms": 1.25, "ages": [{**age, "kv_tokens_per_call": 600.0}]},
    ]
    config = {"window": 512, "sink": 32, "slack": 128}
    write(tmp_path, "retention_a.json", date="2026-01-02", config=config, rows=rows)
    pick = {"what": "index pick", "n_pages": 1000, "average_ms": 0.004}
    slower = {"what": "loop scan", "n_pages": 9000, "average_ms": 9.0}
    write(tmp_path, "eviction_a.json", date="2026-01-02", rows=[pick, slower])
    text = section(tmp_path)
    assert "600 tokens with a bound, 6000 without; a cut takes 1.25 ms" in text
    assert "of 1000 pages | 4.0 us on average" in text


def test_frame_calls_are_told_of(tmp_path):
    stalled = {"arm": "off", "collapsed": True, "predicted_s": 9.0, "saturated_s": 10.0}
    lasted = {"arm": "all", "collapsed": False, "predicted_s": 30.0, "saturated_s": None}
    config = {"sessions": 8, "seconds": 60.0, "pool_tokens": 4096}
    runs = [stalled, lasted]
    write(tmp_path, "collapse_a.json", date="1", device="cpu", config=config, rows=runs)
    minute = {"p99_ms": 200.0, "memory_mib": 900.0}
    write(
        tmp_path,
        "endurance_a.json",
        date="1",
        config={"sessions": 12, "seconds": 900.0, "kills": "thinker@300"},
        frames=1000,
        without_result=0,
        alive_at_the_end=12,
        by_minute=[minute, minute, {"p99_ms": 210.0, "memory_mib": 910.0}],
    )
    settled = {"latency_ms": {"p90": 950.4}, "frames": 1000, "empty_or_dropped": 5}
    trace = [{"open": 3}, {"open": 41}]
    arms = (("window", 11.2), ("unbounded", 40.0))
    found = [{"arm": arm, "open": n, "settled": settled, "trace": trace} for arm, n in arms]
    config = {"call_seconds": 90.0}
    write(tmp_path, "admission_a.json", date="1", config=config, n_star=12, open_systems=found)
    text = section(tmp_path)
    assert "stock SGLang: 1 of 1 runs stall, bounded sessions: 0 of 1 runs stall" in text
    assert "foretold within 10.0 %" in text
    assert "12 of them for 15 min, thinker@300 s killed | 0 of 1000 frames" in text
    assert "P99 200 and 210 ms, memory 900 and 910 MiB" in text
    assert "more calls of 90 s come than can be served | 12 could, by brute force" in text
    assert "bounded at most 41 are let in, 11 at the end, P90 950 ms, 0.5 % of frames" in text
    assert "without a bound at most 41 are let in, 40 at the end" in text


def test_what_the_demo_model_can_do_is_told(tmp_path):
    write(
        tmp_path,
        "demo_exam_a.json",
        date="1",
        understood={"n": 200, "right": 196, "ways": 309},
        questions_as_items={"n": 200, "right": 190, "confidently_wrong": 3},
        people={"n": 19, "not_understood": 18},
    )
    text = section(tmp_path)
    assert "98.0 %; 95.0 %, answered wrong 1.5 %" in text
    assert "not understood 18 of 19" in text


def test_the_real_time_factor_of_one_call_is_told(tmp_path):
    config = {"model_path": "demo", "cores": 1}
    write(tmp_path, "rtf_a.json", date="1", device="cpu", config=config, rtf_median=0.396)
    assert "RTF of the model `demo` on 1 core, its client included (cpu) | 0.40" in section(
        tmp_path
    )
