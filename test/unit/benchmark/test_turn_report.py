"""Tables hold the figures of the rows, and the page those of the newest document."""

import pytest

from benchmark.summary import BEGIN, END, RESULTS, newest
from benchmark.turn_taking.components import silence_rules
from benchmark.turn_taking.page import PAGE, measured
from benchmark.turn_taking.report import (
    delays_at_share,
    end_rows,
    end_table,
    interruption_rows,
    interruption_table,
)
from benchmark.turn_taking.timeline import Recording, Span, Stimulus, Turn
from test.unit.benchmark.test_turn_components import hearing, sound

PCM = sound((1024, 512), (1024, 4096))


def rows():
    turn = Turn(0, 2560, 6656, (Span(1024, 1536),))
    recording = Recording("r", "g", "made", PCM, (turn,))
    rules = [rule for rule in silence_rules() if rule.setting in ("300 ms", "600 ms")]
    return end_rows([(recording, hearing(PCM))], rules)


def test_a_row_for_each_rule_and_source():
    found = [(row["setting"], row["source"], row["false_cutoffs"]) for row in rows()]
    assert found == [
        ("300 ms", "all", 1.0),
        ("300 ms", "made", 1.0),
        ("600 ms", "all", 0.0),
        ("600 ms", "made", 0.0),
    ]


def test_delay_at_the_share_is_between_the_settings():
    [entry] = [entry for entry in delays_at_share(rows()) if entry["source"] == "all"]
    short, long = (row["delay_p50_ms"] for row in rows() if row["source"] == "all")
    assert entry["delay_p50_ms"] == pytest.approx(long + 0.05 * (short - long))


def test_the_table_names_shares_and_counts():
    assert "| `server_vad` | 300 ms | 100 % (1 of 1) |" in end_table(rows())[2]


def test_the_interruption_table_has_the_kinds_of_one_confirmation():
    pcm = sound((0, 1024), (640, 1024))
    stimulus = Stimulus("s", "g", "interruption", pcm, 1024)
    found = interruption_rows([(stimulus, hearing(pcm))], (250, 1000))
    assert [(row["ignores"], row["stopped"]) for row in found] == [
        (False, 1.0),
        (True, 1.0),
        (False, 0.0),
        (True, 0.0),
    ]
    off, on = interruption_table(found, 250)[2:]
    assert off.startswith("| interruption | off | 1 | 100 % |")
    assert on.startswith("| interruption | on | 1 | 100 % |")


def test_the_page_holds_the_newest_document():
    document = newest(RESULTS, "turn_taking")
    assert f"{BEGIN}\n{measured(document)}\n{END}" in PAGE.read_text()
