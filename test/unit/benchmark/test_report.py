import json
from dataclasses import replace

from benchmark.load.config import LoadConfig, Run
from benchmark.load.point import RunResult
from benchmark.load.process_usage import ProcessUsage, label
from benchmark.load.report import collect, document, notes
from benchmark.load.tables import (
    interruption_table,
    open_loop_table,
    process_table,
    ratio_table,
    storm_table,
    table,
)
from sglang_live.extensions.planner.simulation.load.interruptions import PlannedInterruption
from sglang_live.extensions.planner.simulation.load.rows import StormRow, TurnRow
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord


def result(
    policies="off", sessions=1, repeat=0, n_turns=3, late_frames=0.001, rate_rps=None, **more
):
    record = TurnRecord(
        kind="speech",
        status="completed",
        ttfp_ms=700.0,
        end_of_turn_ms=500.0,
        audio_s=1.5,
        generation_s=0.5,
        reply_pcm=b"\0\0",
    )
    row = {"user": 0, "clip": "a", "response_gap_s": 0.1, "start_s": 0.0, "end_s": 4.0}
    return RunResult(
        run=Run(repeat, sessions, policies, rate_rps),
        rows=[TurnRow(turn=i, record=record, **row) for i in range(n_turns)],
        wall_s=4.0,
        server_start_s=2.0,
        late_frames=late_frames,
        usage={"sglang::scheduler": ProcessUsage(2, 3.0, 512.0)},
        **more,
    )


def interrupted(policies="off", n_turns=25):
    """A run whose every turn was interrupted, with 80 ms until the last packet."""
    plain = result(policies, n_turns=n_turns, talker_frames=1000)
    lived = {"interruption": "barge_in", "status": "cancelled", "cut_short": True}
    times = {"stop_latency_ms": 80.0, "silence_ms": 150.0, "heard_in_all_s": 2.0}
    planned = PlannedInterruption("barge_in", 1.5)
    rows = [
        replace(row, record=replace(row.record, **lived, **times), planned=planned)
        for row in plain.rows
    ]
    return replace(plain, rows=rows)


def test_repeats_of_an_arm_at_a_point_become_one_line():
    results = [result(), result("all"), result(repeat=1), result("all", repeat=1)]
    points = collect(results)
    assert [(p.policies, p.runs, p.completed) for p in points] == [("off", 2, 6), ("all", 2, 6)]


def test_the_table_has_na_where_the_sample_is_too_small():
    lines = table(collect([result()])).splitlines()
    assert "n/a/n/a/n/a" in lines[1]
    assert "100.0 %" in lines[1]
    lines = table(collect([result(n_turns=5)])).splitlines()
    assert "700/n/a/n/a" in lines[1]


def test_the_process_table_names_processes():
    assert "sglang::scheduler" in process_table([result()])


def test_a_load_generator_short_of_cpu_is_noted():
    assert not any("too small" in line for line in notes(collect([result()])))
    assert any("too small" in line for line in notes(collect([result(late_frames=0.2)])))


def test_the_document_has_every_turn_and_no_audio():
    config = LoadConfig(policies=("off", "all"), sessions=(1,), seed=7)
    text = json.dumps(document(config, [result(), result("all")], {"git_commit": "abc"}))
    loaded = json.loads(text)
    assert loaded["seed"] == 7
    assert loaded["git_commit"] == "abc"
    assert loaded["config"]["policies"] == ["off", "all"]
    assert [len(run["turns"]) for run in loaded["runs"]] == [3, 3]
    assert loaded["runs"][0]["turns"][0]["ttfp_ms"] == 700.0
    assert "reply_pcm" not in text
    assert loaded["config"]["clips"] == "benchmark/workloads/clips", "no path of this machine"


def test_interruptions_have_a_table_of_their_own():
    assert interruption_table(collect([result()])) is None
    (_, line) = interruption_table(collect([interrupted()])).splitlines()
    assert "80/80" in line
    assert "150/150" in line
    # 25 turns of 2 s were heard of 1000 frames of 80 ms.
    assert "37.5 %" in line


def test_a_document_has_planned_and_actual_interruptions():
    config = LoadConfig(barge_in=0.5, storm=StormSpec(1, 5.0, 10.0))
    loaded = json.loads(json.dumps(document(config, [interrupted()], {})))
    turn = loaded["runs"][0]["turns"][0]
    assert turn["planned"] == {"kind": "barge_in", "after_s": 1.5, "sound": None}
    assert turn["interruption"] == "barge_in"
    assert turn["stop_latency_ms"] == 80.0
    assert loaded["points"][0]["waste"] == 0.375
    assert loaded["workload"] == "W4, barge-in 0.5, false triggers 0, storms"
    assert loaded["config"]["storm"] == {"sessions": 1, "period_s": 5.0, "clip_s": 10.0}


def test_arms_are_compared_with_off_at_the_same_point():
    assert ratio_table(collect([result()])) is None
    off, arm = result(n_turns=25), result("all", n_turns=25)
    twice = [replace(row, record=replace(row.record, ttfp_ms=1400.0)) for row in off.rows]
    (_, line) = ratio_table(collect([replace(off, rows=twice), arm])).splitlines()
    assert line.split()[:3] == ["all/off", "1", "0.50/0.50/0.50"]


def test_an_open_loop_shows_rates_and_viability():
    assert open_loop_table(collect([result()])) is None
    (_, line) = open_loop_table(collect([result(rate_rps=0.5, n_turns=100)])).splitlines()
    assert line.split()[:5] == ["off", "1", "0.5", "700/700", "100"]
    loaded = document(LoadConfig(open_loop_rps=(0.5,), turns=1), [result(rate_rps=0.5)], {})
    assert loaded["workload"] == "W1, single turns"


def test_a_storms_latencies_are_in_a_separate_table():
    assert storm_table(collect([result()])) is None
    answer = TurnRecord(kind="posted", status="incomplete", ttft_ms=900.0)
    row = StormRow(wave=1, session=0, start_s=5.0, record=answer)
    points = collect([result(storm_rows=(row,) * 10)])
    assert storm_table(points).splitlines()[1].split() == ["off", "1", "10", "0", "900/900", "10"]
    assert points[0].ttfp_ms.n == 3


def test_refused_acks_and_late_barge_ins_are_noted():
    lines = "\n".join(notes(collect([result(side_errors=("invalid_value",))])))
    assert "refused 1 truncations or acks" in lines
    missed = result()
    rows = [replace(row, planned=PlannedInterruption("barge_in", 9.0)) for row in missed.rows]
    assert "3 of 3 planned barge-ins came too late" in "\n".join(
        notes(collect([replace(missed, rows=rows)]))
    )


def test_processes_are_named_by_title_or_module():
    spawn = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"]
    assert label("sglang::schedul", ["sglang::scheduler", ""]) == "sglang::scheduler"
    assert label("python", ["python", "-m", "sglang_live.launch_server"]) == (
        "sglang_live.launch_server"
    )
    assert label("python", spawn) == "multiprocessing child"
    assert label("python", ["/usr/bin/python3", "x.py"]) == "python3"
    assert label("kworker", []) == "kworker"
