"""Turns, pauses and back-channels are cut where the annotation says."""

from benchmark.turn_taking.cutting import (
    LAUGHTER,
    Unit,
    backchannels_of,
    is_backchannel,
    turns_of,
)
from benchmark.turn_taking.timeline import Span


def said(speaker: str, *words: tuple[str, float, float]) -> list[Unit]:
    return [Unit(speaker, start, end, text) for text, start, end in words]


A = said("A", ("so", 1000, 1300), ("well", 1700, 2000), ("done", 2050, 2400))


def test_a_gap_of_200_ms_within_a_turn_is_a_pause():
    [turn] = turns_of(A, "A")
    assert (turn.start_ms, turn.end_ms, turn.pauses) == (1000, 2400, (Span(1300, 1700),))
    assert turn.alone and turn.next_ms is None


def test_another_speakers_turn_ends_a_turn():
    other = said("B", ("but", 1320, 1400), ("no", 1420, 1500))
    first, second = turns_of(A + other, "A")
    assert (first.end_ms, first.next_ms) == (1300, 1320)
    assert (second.start_ms, second.pauses) == (1700, ())


def test_a_listeners_word_does_not_end_a_turn():
    [turn] = turns_of(A + said("B", ("mm-hmm", 1400, 1600)), "A")
    assert turn.pauses == (Span(1300, 1700),)


def test_a_long_silence_ends_a_turn():
    turns = turns_of(said("A", ("one", 0, 300), ("two", 3300, 3600)), "A")
    assert [(turn.start_ms, turn.next_ms) for turn in turns] == [(0, 3300), (3300, None)]


def test_a_turn_whose_last_part_another_speaker_overlaps_is_not_alone():
    [turn] = turns_of(A + said("B", ("what", 2300, 2900)), "A")
    assert not turn.alone


def test_back_channels_alone_are_no_turn():
    assert turns_of(A + said("B", ("Yeah.", 1400, 1600)), "B") == []


def test_listeners_words_and_laughter_are_back_channels():
    assert is_backchannel(said("B", ("Uh-huh", 0, 300), (LAUGHTER, 310, 900)))
    assert not is_backchannel(said("B", ("yeah", 0, 300), ("but", 310, 500)))
    assert not is_backchannel(said("B", (LAUGHTER, 0, 1001)))


def test_without_words_a_short_segment_is_a_back_channel():
    assert is_backchannel([Unit("B", 0, 900)])
    assert not is_backchannel([Unit("B", 0, 1200)])


def test_back_channels_are_found_while_another_speaks():
    speaks = [Unit("A", 0, 5000, "talk")]
    during, after = ("mm-hmm", 2000, 2300), ("okay", 6000, 6300)
    assert backchannels_of(speaks + said("B", during, after)) == [("B", Span(2000, 2300))]
    assert backchannels_of(speaks + said("B", during, after), alone=True) == [
        ("B", Span(6000, 6300))
    ]
