import json

from benchmark.load.caller import TurnRow
from benchmark.load.config import LoadConfig, Run
from benchmark.load.point import RunResult
from benchmark.load.process_usage import ProcessUsage, label
from benchmark.load.report import collect, document, notes, process_table, table
from sglang_live.client.turn_record import TurnRecord


def result(policies="off", sessions=1, repeat=0, n_turns=3, late_frames=0.001):
    record = TurnRecord(
        kind="speech",
        status="completed",
        ttfp_ms=700.0,
        end_of_turn_ms=500.0,
        audio_s=1.5,
        generation_s=0.5,
        reply_pcm=b"\0\0",
    )
    row = {"caller": 0, "clip": "a", "reply_gap_s": 0.1, "start_s": 0.0, "end_s": 4.0}
    return RunResult(
        run=Run(repeat, sessions, policies),
        rows=[TurnRow(turn=i, record=record, **row) for i in range(n_turns)],
        wall_s=4.0,
        server_start_s=2.0,
        late_frames=late_frames,
        usage={"sglang::scheduler": ProcessUsage(2, 3.0, 512.0)},
    )


def test_repeats_of_an_arm_at_a_point_become_one_line():
    results = [result(), result("all"), result(repeat=1), result("all", repeat=1)]
    points = collect(results)
    assert [(p.policies, p.runs, p.completed) for p in points] == [("off", 2, 6), ("all", 2, 6)]


def test_the_table_says_na_where_the_sample_is_too_small():
    lines = table(collect([result()])).splitlines()
    assert "n/a/n/a/n/a" in lines[1]
    assert "100.0 %" in lines[1]
    lines = table(collect([result(n_turns=5)])).splitlines()
    assert "700/n/a/n/a" in lines[1]


def test_the_process_table_names_processes():
    assert "sglang::scheduler" in process_table([result()])


def test_a_load_generator_that_could_not_keep_up_is_told_on():
    assert not any("too small" in line for line in notes(collect([result()])))
    assert any("too small" in line for line in notes(collect([result(late_frames=0.2)])))


def test_the_document_holds_every_turn_and_no_audio():
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


def test_processes_are_named_by_title_or_module():
    spawn = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"]
    assert label("sglang::schedul", ["sglang::scheduler", ""]) == "sglang::scheduler"
    assert label("python", ["python", "-m", "sglang_live.launch_server"]) == (
        "sglang_live.launch_server"
    )
    assert label("python", spawn) == "multiprocessing child"
    assert label("python", ["/usr/bin/python3", "x.py"]) == "python3"
    assert label("kworker", []) == "kworker"
