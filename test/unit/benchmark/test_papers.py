"""Claims about the papers' experiments on the simulated server, and about their pictures."""

import json
from dataclasses import asdict, replace

import pytest

from benchmark.papers import liveserve, metronome, voxserve
from benchmark.papers.command import Paper
from benchmark.papers.experiments import Experiment, Row, rows_of, to_json
from benchmark.papers.picture import Panel, draw
from benchmark.simulate.config import SimulateConfig
from sglang_live.extensions.planner.simulation.run import Arm

ALL = (*liveserve.EXPERIMENTS, *voxserve.EXPERIMENTS)
SMALL = Experiment(name="small", figure="", arms=("off", "all"), users=(2,), settings={"turns": 2})


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_every_experiment_has_known_arms_and_settings(one):
    assert [Arm.parse(arm).policies for arm in one.arms]
    assert one.config(repeats=1, seed=1).sessions == one.users


def test_an_experiment_has_a_row_for_each_arm_and_load():
    rows = rows_of(replace(SMALL, barge_in=(0.0, 1.0)), repeats=1, seed=1)
    found = [(row.barge_in, row.arm, row.users) for row in rows]
    assert found == [(p, arm, 2) for p in (0.0, 1.0) for arm in SMALL.arms]
    assert all(row.completed == 4 and row.failed == 0 for row in rows)
    assert to_json(SMALL, rows)["rows"][0]["arm"] == "off"


def test_one_request_at_a_time_delays_the_users_behind_it():
    def p50_ms(settings):
        one = replace(SMALL, arms=("off",), users=(8,), settings={"turns": 2, **settings})
        return rows_of(one, repeats=1, seed=1)[0].first_audio_p50_ms

    assert p50_ms(voxserve.ONE_AT_A_TIME) > 2 * p50_ms({})


def test_servers_side_by_side_share_the_users():
    one, four = (replace(SMALL, users=(8,), n_servers=n) for n in (1, 4))
    alone, beside = (rows_of(e, repeats=1, seed=1) for e in (one, four))
    assert [row.completed for row in alone] == [row.completed for row in beside] == [16, 16]
    assert beside[0].first_audio_p50_ms < alone[0].first_audio_p50_ms


def test_an_open_loop_has_its_rate_and_its_turns_over_time():
    one = replace(SMALL, users=(6,), settings={"turns": 2, "arrive_s": 12.0}, span_s=10.0)
    for row in rows_of(one, repeats=2, seed=1):
        assert row.arrivals_per_s == 0.5
        assert row.completed == 24 and row.failed == row.refused == row.sessions_left == 0
        assert sum(span.turns for span in row.over_time) == 24
        assert Row.from_json(json.loads(json.dumps(asdict(row)))) == row


def test_the_pool_of_an_experiment_is_watched():
    one = replace(SMALL, arms=("off",), span_s=5.0, watch_s=120.0)
    [row] = rows_of(one, repeats=1, seed=1)
    pool = row.pool
    assert 0 < pool.tokens_mean < pool.tokens_most <= row.kv_tokens
    assert pool.waits_share < 0.5 and len(pool.tokens_over_time) == int(pool.last_end_s / 5.0)
    assert Row.from_json(json.loads(json.dumps(asdict(row)))) == row
    with pytest.raises(ValueError, match="the watch before"):
        rows_of(replace(one, watch_s=1.0), repeats=1, seed=1)


def test_liveserve_draws_what_its_document_has():
    rows = rows_of(replace(SMALL, span_s=10.0, watch_s=120.0), repeats=1, seed=1)
    assert liveserve.panels({}) == []
    found = {"open loop, Poisson": rows, "continuity over time": rows}
    drawn = liveserve.panels(found)
    assert [panel.x for panel in drawn] == ["arrivals_per_s", "arrivals_per_s", "x"]
    assert {point.y for point in drawn[-1].rows} == {1.0, None}
    kept = [replace(row, arm=liveserve.PACED) for row in rows[1:]]
    names = [one.name for one in liveserve.EXPERIMENTS if one.figure == "Fig. 17"]
    first_audio, _, _, held = liveserve.panels(dict.fromkeys(names, kept))
    assert {point.arm for point in first_audio.rows} == set(liveserve.U2_WEIGHTS)
    assert max(point.y for point in held.rows) > 0


def test_only_names_experiments_by_their_begin(monkeypatch, capsys):
    paper = Paper("papers_test", "title", (SMALL, replace(SMALL, name="other")), lambda found: [])
    monkeypatch.setattr("sys.argv", ["test", "--repeats", "1", "--only", "oth"])
    paper.main("A test.")
    assert "other" in (said := capsys.readouterr().out) and "small" not in said
    monkeypatch.setattr("sys.argv", ["test", "--only", "nothing"])
    with pytest.raises(SystemExit):
        paper.main("A test.")


def test_a_document_is_continued(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    other = replace(SMALL, name="other")
    paper = Paper("papers_test", "title", (SMALL, other), lambda found: [])
    for only in ("small", "other"):
        argv = ["test", "--repeats", "1", "--only", only, "--json", str(path)]
        monkeypatch.setattr("sys.argv", argv)
        paper.main("A test.")
    document = json.loads(path.read_text())
    assert list(document["experiments"]) == ["small", "other"]
    monkeypatch.setattr("sys.argv", ["test", "--repeats", "2", "--json", str(path)])
    with pytest.raises(SystemExit, match="another configuration"):
        paper.main("A test.")


def test_curves_are_drawn(tmp_path):
    rows = rows_of(SMALL, repeats=1, seed=1)
    path = tmp_path / "curves.svg"
    draw("A title", [Panel("panel", "users", "continuous", rows, "users", "continuity")], path)
    assert "A title" in path.read_text()


def test_bounded_sessions_are_drawn(tmp_path):
    ages = [
        {"turn": n, "turn_ms": 10.0, "turn_p90_ms": 12.0, "kv_tokens_per_call": 600.0}
        for n in (10, 20)
    ]
    arms = ("everything", "bounded", "again", "bounded 1024")
    retention = {"config": {"window": 512}, "rows": [{"arm": a, "ages": ages} for a in arms]}
    trace = [{"at_s": 1.0, "open": 3, "limit": 4}]
    systems = [{"arm": "window", "trace": trace}]
    path = tmp_path / "bounded.svg"
    metronome.draw({"open_systems": systems, "n_star": 4}, retention, path)
    assert "by brute force" in path.read_text()


def test_flags_of_the_simulator_bound_its_engines():
    config = SimulateConfig(max_running_requests=2, vocoder_batch=3)
    assert config.server.max_running_requests == 2
    assert config.server.vocoder.max_batch == 3
