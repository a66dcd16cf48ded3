"""Spans of a turn's trace beside their costs on a modelled device."""

import json

import pytest

from benchmark.modelled_turn import Sizes, costs_ms, marks_of, measured_ms, sizes_of, table
from sglang_live.extensions.planner.device_model.model import H100, load_device_model
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord

SIZES = Sizes(prompt_tokens=100, new_tokens=60, audio_s=4.0, n_tokens=11, n_frames=21)
MARKS = {
    "thinker_first_token": 0.030,
    "thinker_done": 0.130,
    "talker_first_frame": 0.060,
    "first_audio": 0.080,
    "talker_done": 0.360,
}


def test_sizes_come_from_the_usage_of_a_response():
    usage = {
        "input_tokens": 100,
        "input_token_details": {"audio_tokens": 50, "cached_tokens": 40},
        "output_token_details": {"text_tokens": 11, "audio_tokens": 21},
    }
    assert sizes_of(usage) == SIZES


def test_costs_are_those_of_the_device_model():
    model = load_device_model(H100)
    costs = costs_ms(model, SIZES)
    frame_ms = 1000 * model.talker.decode_s(1, 110)
    assert costs["thinker, first token"] == pytest.approx(15 + 60 * 0.022 + 4 * 1.5)
    assert costs["talker, first frame"] == pytest.approx(10 + 0.5 + frame_ms)
    assert costs["talker and vocoder, first audio"] == pytest.approx(frame_ms + 2.52)
    assert costs["thinker, per further token"] == pytest.approx(7.13 + 105 * 52e-6)


def test_spans_lie_between_the_marks():
    record = TurnRecord(kind="speech", status="completed", ttfp_ms=590.0, end_of_turn_ms=500.0)
    spans = measured_ms(MARKS, record, SIZES)
    assert [round(ms) for ms in spans.values()] == [30, 30, 20, 80, 90, 10, 15]
    assert spans.keys() == costs_ms(load_device_model(H100), SIZES).keys()


def test_the_marks_are_those_of_the_turn_in_the_timeline(tmp_path):
    events = [{"event": "first_audio"}, {"event": "turn_result", "marks": MARKS}]
    (tmp_path / "s.json").write_text(json.dumps({"events": events}))
    assert marks_of(tmp_path / "s.json") == MARKS


def test_the_table_has_medians_and_the_lateness_of_each_arm():
    rows = [
        {"arm": arm, "computed_ms": {"first token": 7.0}, "measured_ms": {"first token": ms}}
        for arm, ms in (("own", 8.0), ("own", 9.0), ("own", 20.0), ("one", 12.0))
    ]
    device = {
        arm: {"talker": {"late_s": late_s, "modelled_s": 2.0}}
        for arm, late_s in (("own", 0.1), ("one", 0.5))
    }
    assert table(rows, device) == [
        "| span | computed | own | one |",
        "|---|---|---|---|",
        "| first token | 7.0 ms | 9.0 ms | 12.0 ms |",
        "| results of the talker late by | | 5 % | 25 % |",
    ]
