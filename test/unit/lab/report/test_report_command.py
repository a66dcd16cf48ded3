"""The command: it reads a document and writes a figure."""

import json
import re
import sys

import pytest
from PIL import Image

from lab.report.__main__ import NO_MATPLOTLIB, main
from lab.report.documents import LoadDocument, Timeline, read


def drawn(path, suffix: str):
    out = path.with_suffix(suffix)
    assert main([str(path), "--out", str(out)]) == 0
    return out


def test_a_timeline_shows_speech_and_heard_audio(timeline, written):
    text = drawn(written(timeline), ".svg").read_text()
    for label in (
        "Session sess_7 (2 events not recorded)",
        "user",
        "response heard",
        "audio of the response (s)",
        "time since the session began (s)",
        "buffer: sent, not heard yet",
        "speech suspected",
        "audio held",
        "stall",
        "barge-in or cancel",
        "truncated",
        "never heard",
    ):
        assert label in text, label


def test_the_legend_has_only_entries_of_the_timeline(timeline, written):
    quiet = [event for event in timeline["events"] if event["t_s"] < 4.8]
    text = drawn(written({**timeline, "events": quiet, "dropped": 0}), ".svg").read_text()
    assert "barge-in" not in text
    assert "stall" not in text
    assert ">Session sess_7<" in text


def test_a_load_shows_all_arms(load, written):
    text = drawn(written(load), ".svg").read_text()
    for label in (
        ">off<",
        ">all<",
        "P90 TTFP (ms)",
        "sessions at once",
        "turns/s",
        "uninterrupted turns (%)",
        "SLO 99 %",
        "Waste: generated, never heard",
        "W4, barge-in 0.5",
        "commit 012345678",
        "1 points had fewer than the 10 turns that a P90 needs",
    ):
        assert label in text, label
    assert "not measured" not in text


def test_an_open_loop_is_drawn_over_its_rates(load, written):
    for point in load["points"]:
        point["rate_rps"] = point["sessions"] / 60
    text = drawn(written(load), ".svg").read_text()
    assert "arrivals per second" in text
    assert "Streaming viability" in text


def test_a_missing_measurement_is_marked(load, written):
    for point in load["points"]:
        del point["waste"]
    assert "not measured" in drawn(written(load), ".svg").read_text()


def test_kv_pressure_shows_waits_tokens_and_loads(kv_pressure, written):
    text = drawn(written(kv_pressure), ".svg").read_text()
    for label in (
        "KV pressure: 24 sessions",
        ">lru<",
        ">preload<",
        "turns that waited no longer (%)",
        "preloaded in time",
        "recomputed",
        ">56 loads<",
        "modelled link 0.02:200",
    ):
        assert label in text, label


def test_long_sessions_show_memory_and_time_over_age(retention, written):
    text = drawn(written(retention), ".svg").read_text()
    for label in ("Long sessions: 4 sessions", ">bounded<", ">everything<", "tokens of KV"):
        assert label in text, label


def test_endless_sessions_show_pools_latency_and_the_prediction(collapse, written):
    text = drawn(written(collapse), ".svg").read_text()
    for label in (
        "off: 2 of 2 collapsed",
        "all: 0 of 1 collapsed",
        "predicted",
        "age of the session",
    ):
        assert label in text, label


def test_admission_shows_admitted_sessions_and_the_limit(admission, written):
    text = drawn(written(admission), ".svg").read_text()
    for label in (">window<", ">unbounded<", "By brute force", ">P99<", "Open sessions"):
        assert label in text, label


MEASURED = ("continuity", "viability", "waste")
SIZES = {
    "collapse": (1650, 660),
    "admission": (1650, 660),
    "timeline": (1350, 1110),
    "load": (1650, 1230),
    "kv_pressure": (1650, 660),
    "retention": (1350, 660),
}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_a_png_is_large_enough_to_read(request, written, name, size):
    out = drawn(written(request.getfixturevalue(name)), ".png")
    with Image.open(out) as image:
        assert image.size == size


def test_the_default_figure_is_next_to_the_document(load, written):
    path = written(load)
    assert main([str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 20_000


def test_a_document_is_recognized_by_its_contents(timeline, load, written):
    assert isinstance(read(written(timeline)), Timeline)
    assert isinstance(read(written(load)), LoadDocument)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"benchmark": "turn_cost"}, "neither"),
        ([], "neither"),
        ({"session": "s", "events": []}, "no events"),
        ({"session": "s", "events": [{"event": "held"}]}, "broken document"),
        ({"benchmark": "voice_load", "points": []}, "no points"),
        ({"benchmark": "kv_pressure", "rows": []}, "no turns"),
        ({"benchmark": "retention", "rows": [{"arm": "bounded", "ages": []}]}, "no ages"),
        ({"benchmark": "voice_load", "points": [{"sessions": 1}]}, "broken document"),
        ({"benchmark": "collapse", "rows": []}, "no runs"),
        ({"benchmark": "admission", "ladder": [], "open_systems": [], "n_star": 0}, "no open"),
    ],
)
def test_a_document_that_cannot_be_drawn_is_exit_code_2(written, capsys, document, message):
    assert main([str(written(document))]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_json_is_exit_code_2(tmp_path, capsys):
    path = tmp_path / "x.json"
    assert main([str(path)]) == 2
    path.write_text("not json")
    assert main([str(path)]) == 2
    assert re.search(r"cannot read .*\n.*is not JSON", capsys.readouterr().err)


def test_only_png_and_svg_are_written(load, written, capsys):
    assert main([str(written(load)), "--out", "x.pdf"]) == 2
    assert "must end in .png or .svg" in capsys.readouterr().err


def test_without_matplotlib_the_error_says_what_to_install(load, written, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(written(load))]) == 2
    assert NO_MATPLOTLIB in capsys.readouterr().err


def form(document: LoadDocument) -> str:
    """What the layout of a figure depends on: its load's kind, and which values each arm has."""
    known = [
        [
            (point["ttfp_ms"]["p90"] is None, *(point.get(name) is None for name in MEASURED))
            for point in points
        ]
        for points in document.arms.values()
    ]
    return f"{document.open_loop} {known}"


def test_stored_results_of_voice_load_can_be_drawn(written):
    """Every figure is made; one of each form is laid out and written, which takes ten times as
    long.
    """
    from benchmark.load.provenance import ROOT
    from lab.report import load_figure

    forms = {}
    for path in sorted((ROOT / "benchmark" / "results").glob("voice_load_*.json")):
        document = read(path)
        forms[form(document)] = path
        assert load_figure.draw(document).axes
    for path in forms.values():
        assert drawn(written(json.loads(path.read_text())), ".svg").stat().st_size > 5000
