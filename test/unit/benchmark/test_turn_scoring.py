"""Each figure of turn taking by a case whose answer is known."""

import pytest

from benchmark.turn_taking.scoring import (
    EARLY_MS,
    LATE_MS,
    TurnOutcome,
    auc,
    delay_at,
    end_figures,
    interruption_figures,
    turn_outcome,
    wilson,
)
from benchmark.turn_taking.timeline import Decision, Span, Turn

# Speech from 1 to 5 s with pauses at 2 and 3 s; the next turn begins at 9 s.
TURN = Turn(1000, 5000, 9000, (Span(2000, 2600), Span(3000, 3400)))


def ended(*at_ms: float) -> list[Decision]:
    return [Decision("ended", at) for at in at_ms]


def test_an_end_after_the_last_word_is_late_by_its_distance():
    assert turn_outcome(TURN, ended(5540)) == TurnOutcome(2, 0, 0, True, 540)


def test_only_the_first_decision_after_the_end_counts():
    assert turn_outcome(TURN, ended(5300, 6900)).delay_ms == 300


def test_an_end_within_the_annotations_tolerance_has_no_delay():
    assert turn_outcome(TURN, ended(5000 - EARLY_MS)) == TurnOutcome(2, 0, 0, True, 0)


def test_a_pause_that_is_taken_for_the_end_is_one_false_cutoff():
    assert turn_outcome(TURN, ended(2300, 2500, 5540)) == TurnOutcome(2, 1, 0, True, 540)


def test_a_decision_as_the_voice_returns_still_belongs_to_the_pause():
    assert turn_outcome(TURN, ended(2600 + LATE_MS - 1)).cut_pauses == 1
    late = turn_outcome(TURN, ended(2600 + LATE_MS))
    assert (late.cut_pauses, late.cut_words) == (0, 1)


def test_an_end_that_is_not_noticed_before_the_next_turn_is_missed():
    figures = end_figures([turn_outcome(TURN, ended(9100))])
    assert (figures.turns, figures.missed, figures.delay_p50_ms) == (1, 1, None)


def test_a_turn_without_a_known_end_counts_only_for_its_pauses():
    cut = Turn(1000, 5000, 9000, TURN.pauses, ends=False)
    figures = end_figures([turn_outcome(cut, ended(2300, 5100))])
    assert (figures.turns, figures.missed, figures.false_cutoffs) == (0, 0, 0.5)


def test_holds_are_no_ends():
    assert turn_outcome(TURN, [Decision("held", 5200)]).delay_ms is None


def test_figures_of_several_turns():
    outcomes = [TurnOutcome(4, 1, 0, True, 100.0 * n) for n in range(1, 12)]
    figures = end_figures(outcomes)
    assert figures.pauses == 44
    assert figures.false_cutoffs == 0.25
    assert (figures.delay_p50_ms, figures.delay_p90_ms) == (600, 1000)


def test_no_pause_gives_no_share():
    assert end_figures([TurnOutcome(0, 0, 0, True, 100)]).false_cutoffs is None


def test_the_delay_at_a_share_lies_on_the_line_between_two_settings():
    curve = [(0.2, 300.0), (0.0, 1100.0), (0.1, 500.0)]
    assert delay_at(curve, 0.05) == pytest.approx(800)


def test_a_setting_that_another_surpasses_is_left_out():
    assert delay_at([(0.0, 1000.0), (0.05, 2000.0), (0.1, 500.0)], 0.05) == pytest.approx(750)


def test_a_share_that_no_setting_keeps_has_no_delay():
    assert delay_at([(0.1, 500.0), (0.2, 300.0)], 0.05) is None


def test_a_curve_that_ends_before_the_share_gives_its_last_delay():
    assert delay_at([(0.0, 900.0), (0.02, 700.0)], 0.05) == 700


def test_interruptions_count_stops_holds_and_reactions():
    stop, hold = Decision("stopped", 1300), Decision("held", 1100)
    heard = [(1000, [hold, stop]), (1000, [hold]), (1000, []), (1000, [Decision("stopped", 900)])]
    figures = interruption_figures(heard)
    assert (figures.n, figures.stops, figures.early_stops, figures.holds) == (4, 2, 1, 1)
    assert figures.stopped == 0.5
    assert figures.reaction_p50_ms == 300
    assert figures.longest_hold_ms is None


def test_a_hold_lasts_until_the_audio_is_released():
    kinds = ("held", 1100), ("released", 1400), ("held", 2000), ("released", 2500)
    heard = [Decision(kind, at_ms) for kind, at_ms in kinds]
    assert interruption_figures([(1000, heard)]).longest_hold_ms == 500


def test_the_interval_of_a_share_is_wilsons():
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_auc_is_the_share_of_pairs_in_order():
    assert auc([3, 2], [1, 2]) == pytest.approx(3.5 / 4)
    assert auc([], [1]) is None
