"""The tables of docs/, benchmark/notes/ and README.md come from result documents alone."""

import json
import re

from benchmark.summary import (
    PAGES,
    REGIONS,
    RESULTS,
    ROOT,
    baseline_tables,
    filled,
    newest,
    regions_of,
    section,
)

_SOURCE = {"device": "cpu", "git_commit": "0123456789ab"}


def write(results, name: str, **document) -> None:
    """name: that of the benchmark, then `_` and that of the document."""
    benchmark, _, file = name.rpartition("_")
    (results / benchmark).mkdir(exist_ok=True)
    (results / benchmark / file).write_text(json.dumps({**_SOURCE, **document}))


def test_the_pages_have_the_tables_of_the_kept_results():
    texts = [path.read_text() for path in PAGES]
    assert [text for text in texts if filled(text) != text] == []
    named = [region for text in texts for region in regions_of(text)]
    assert sorted(named) == sorted(REGIONS)


def test_documents_without_a_known_clean_checkout_are_listed():
    marked = set()
    for path in RESULTS.rglob("*.json"):
        document = json.loads(path.read_text())
        assert document["git_commit"], path
        if document["git_dirty"] is not False:
            marked.add(str(path.relative_to(RESULTS)))
    listed = re.findall(r"^\| `(.+?)` \|", (RESULTS / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == marked


def test_every_row_of_headline_results_repeats_figures_of_the_tables():
    readme = (ROOT / "README.md").read_text()
    tables = section(RESULTS) + baseline_tables(RESULTS)
    block = readme.split("## Headline results")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!question|---)(.*) \|$", block, re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        figures = re.findall(r"\d+ ms(?=, \d)|\d+\.\d %|\d+ of \d+ runs|\d+ users(?= \|)", row)
        figures = [re.sub(r"(,| users$)", "", figure).strip() for figure in figures]
        assert len(figures) >= 2
        assert [figure for figure in figures if figure not in tables] == []


def test_without_results_the_section_says_that_nothing_was_measured(tmp_path):
    assert section(tmp_path) == "Nothing has been measured yet."


def test_the_newest_document_of_a_benchmark_counts(tmp_path):
    write(tmp_path, "turn_cost_a.json", date="2026-01-02", device="cpu", overhead_of_all=0.2)
    write(tmp_path, "turn_cost_b.json", date="2026-01-03", device="cpu", overhead_of_all=0.1)
    write(tmp_path, "other_c.json", date="2026-01-04", overhead_of_all=0.9)
    assert newest(tmp_path, "turn_cost")["overhead_of_all"] == 0.1
    assert "10.0 % of a turn" in section(tmp_path)


def turn(start_s: float) -> dict:
    """A turn of 3 s of speech, whose response of 4 s starts after 1 s and is sent 2 s early."""
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
    open_loop = barge_in | {"open_loop_rps": [0.75], "trace_arrivals": True}
    write(tmp_path, "voice_load_e.json", **load("2026-01-03", open_loop, waste=0.5))
    offload = barge_in | {"server_args": ["--thinker.enable-hierarchical-cache"]}
    write(tmp_path, "voice_load_f.json", **load("2026-01-03", offload, waste=0.5))
    text = section(tmp_path)
    assert "### Interruptions with probability 0.5\n\ncpu, commit 012345678.\n" in text
    assert "Storms: 4 messages of 30 s every 10 s beside the users\n" in text
    assert "### Ablation: interruptions with probability 0.5\n" in text
    rate = "0.75 users a second arrive in the bursts of a trace"
    assert f"### Open loop: {rate}, interruptions with probability 0.5\n" in text
    assert "### Interruptions with probability 0.5, with HiCache in the thinker\n" in text
    assert text.count("| 6.1 % |") == 1 and text.count("50.0 %") == 2


def test_one_table_has_all_numbers_of_users_of_a_kind(tmp_path):
    few = load("2026-01-01", {}, continuity=0.99)
    many = load("2026-01-02", {}, sessions=12, stop_latency_ms={"p95": 161.2})
    many["runs"][0]["sessions"] = 12
    again = load("2026-01-03", {}, continuity=0.5)
    again["git_commit"] = "fedcba987654"
    write(tmp_path, "voice_load_a.json", **few)
    write(tmp_path, "voice_load_b.json", **many)
    write(tmp_path, "voice_load_c.json", **again)
    text = section(tmp_path)
    assert text.count("### Conversations without interruptions\n") == 1
    assert "4 users: cpu, commit fedcba987; 12 users: cpu, commit 012345678.\n" in text
    assert text.index("| 4 | `all` | n/a / n/a | 50.0 % |") < text.index("| 12 | `all` |")
    assert "| 161 ms |" in text and "99.0 %" not in text


def test_another_model_has_a_table_of_its_own(tmp_path):
    write(tmp_path, "voice_load_a.json", **load("1", {"model_path": "demo-random"}))
    write(tmp_path, "voice_load_b.json", **load("2", {"model_path": "demo"}))
    text = section(tmp_path)
    assert "### Conversations without interruptions\n" in text
    assert "### Conversations without interruptions, with the model `demo`\n" in text


def test_a_modelled_device_has_a_table_of_its_own_with_the_lateness_of_results(tmp_path):
    modelled = load("2026-01-02", {"repeats": 9}, continuity=0.5)
    modelled["device_model"] = {"modelled_device": "NVIDIA H100"}
    modelled["runs"][0]["device"] = {
        "thinker": {"late_s": 0.1, "modelled_s": 2.0},
        "talker": {"late_s": 0.5, "modelled_s": 2.0},
    }
    write(tmp_path, "voice_load_a.json", **load("2026-01-01", {}, continuity=0.99))
    write(tmp_path, "voice_load_b.json", **modelled)
    text = section(tmp_path)
    measured, of_model = text.split("on the modelled device NVIDIA H100\n")
    assert "### Conversations without interruptions\n" in measured
    assert "| 99.0 % |" in measured and "| 50.0 % |" not in measured
    assert "| late frames | late results |\n" in of_model
    assert "| 50.0 % | n/a | n/a | 0.17 | 3 | 0 | 2.1 % | 25.0 % |\n" in of_model


def test_the_server_rows_are_of_the_newest_measured_document(tmp_path):
    modelled = load("2026-01-02", {}, peak_rss_mib=5000.0)
    modelled["device_model"] = {"modelled_device": "NVIDIA H100"}
    modelled["runs"][0]["device"] = {"talker": {"late_s": 0.5, "modelled_s": 2.0}}
    write(tmp_path, "voice_load_a.json", **load("2026-01-01", {"model_path": "demo"}))
    write(tmp_path, "voice_load_b.json", **modelled)
    text = section(tmp_path)
    assert "serves, model `demo` | 20 to 20 s |" in text
    assert "model `demo` | 4000 MiB |" in text


def test_a_bound_on_responses_is_named(tmp_path):
    write(tmp_path, "voice_load_a.json", **load("1", {"max_tokens": 60}))
    assert "without interruptions, responses of at most 60 tokens\n" in section(tmp_path)


def test_shares_and_times_are_rounded(tmp_path):
    own = {"p50": 268.4, "p90": 739.2, "n": 36}
    document = load("2026-01-01", {}, ttfp_after_detection_ms=own, continuity=0.958)
    write(tmp_path, "voice_load_cpu.json", **document)
    assert "| 4 | `all` | 268 / 739 ms | 95.8 % | n/a | n/a | 0.17 | 36 | 0 | 2.1 % |" in section(
        tmp_path
    )


def test_kv_under_pressure_has_a_row_per_arm_over_all_repeats(tmp_path):
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
    assert (
        "24 sessions, a modelled link to host memory of 0.02 GB/s and 200 us. cpu, commit" in text
    )


def test_every_size_of_the_kv_pool_has_its_newest_table(tmp_path):
    for name, date, share in (("a", "1", 0.5), ("b", "2", 0.7), ("c", "3", 0.5)):
        config = {"sessions": int(date), "link": "", "pool_share": share}
        write(tmp_path, f"kv_pressure_{name}.json", date=date, config=config, rows=[])
    text = section(tmp_path)
    assert "holds: room for 50 % of their KV\n\n3 sessions," in text
    assert "holds: room for 70 % of their KV\n\n2 sessions," in text
    assert "1 sessions" not in text


def test_replayed_schedules_are_summed_over_repeats(tmp_path):
    outcome = {"misses": 20, "reuses": 100, "hidden_tokens": 95, "reloaded_tokens": 100}
    replayed = [
        {"policy": policy, "demand": {**outcome, "misses": n}, "preload": outcome}
        for policy, n in (("next-use", 21), ("informed", 20), ("belady", 15))
        for _ in range(2)
    ]
    write(
        tmp_path,
        "kv_pressure_a.json",
        date="2026-01-02",
        device="cpu",
        config={"sessions": 24, "link": ""},
        rows=[],
        replayed=replayed,
    )
    text = section(tmp_path)
    assert "of 200 requests" in text and "`next-use` 42, `informed` 40, `belady` 30." in text
    assert "`next-use` has 1.05 times the misses of `informed`." in text
    assert "`next-use` hides 95.0 % of the reloads" in text


def test_retention_and_eviction_have_a_row_each(tmp_path):
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
    assert "600 tokens with `retention`, 6000 without; a compaction takes 1.25 ms" in text
    assert "of 1000 pages | 4.0 us on average" in text


def test_each_result_of_frame_mode_has_a_row(tmp_path):
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
    assert "is predicted to within 10.0 %" in text
    assert "12 sessions in frame mode, 15 min, thinker@300 s killed | 0 of 1000 frames" in text
    assert "P99 200 and 210 ms, memory 900 and 910 MiB" in text
    assert (
        "more sessions of 90 s arrive than the server can serve | 12 can be served, by brute"
        in text
    )
    assert (
        "with `retention` at most 41 are admitted, 11 at the end, P90 950 ms, 0.5 % of frames"
        in text
    )
    assert "without it at most 41 are admitted, 40 at the end" in text


def test_policies_in_an_engine_have_a_row_per_number_of_streams(tmp_path):
    row = {"n_streams": 64, "decide_ms_per_round": 0.25, "share_of_rounds": 0.0171}
    row |= {"round_ms": 14.9, "python_share_of_rounds": 0.2, "late_share_of_rounds": 0.01}
    write(tmp_path, "policy_engine_a.json", date="1", rows=[row])
    assert (
        "64 streams in a thinker | 0.250 ms, 1.71 % of a round of 14.9 ms; all Python of its "
        "scheduler 20.0 %; results late by 1.0 % | cpu" in section(tmp_path)
    )


def test_turns_on_a_modelled_device_have_a_table(tmp_path):
    spans = {"computed_ms": {"thinker": 7.0}, "measured_ms": {"thinker": 8.5}}
    document = {
        "config": {"turns": 1},
        "rows": [{"arm": "one device", **spans}],
        "device_times": {"one device": {"talker": {"late_s": 0.1, "modelled_s": 1.0}}},
    }
    write(tmp_path, "modelled_turn_a.json", date="1", **document)
    text = section(tmp_path)
    assert "### One spoken turn on a modelled device\n" in text
    assert "| thinker | 7.0 ms | 8.5 ms |" in text


def test_the_exam_of_the_demo_model_has_a_row(tmp_path):
    write(
        tmp_path,
        "demo_exam_a.json",
        date="1",
        understood={"n": 200, "right": 196, "ways": 309},
        questions_as_items={"n": 200, "right": 190, "confidently_wrong": 3},
        people={"n": 19, "not_understood": 18},
    )
    text = section(tmp_path)
    assert "98.0 %; 95.0 % right, 1.5 % wrong" in text
    assert "18 of 19 not understood" in text


def test_the_real_time_factor_has_a_row(tmp_path):
    config = {"model_path": "demo", "cores": 1}
    write(tmp_path, "rtf_a.json", date="1", device="cpu", config=config, rtf_median=0.396)
    assert "RTF of the model `demo` on 1 core, the client included | 0.40 | cpu" in section(
        tmp_path
    )
