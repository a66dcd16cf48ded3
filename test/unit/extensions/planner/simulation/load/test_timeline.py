import pytest

from sglang_live.extensions.planner.simulation.load.rows import TurnRow
from sglang_live.extensions.planner.simulation.load.timeline import most_at_once, spans
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord


def turn(start_s: float, *, status: str = "completed", gaps: int = 0) -> TurnRow:
    record = TurnRecord(kind="speech", status=status, user_audio_s=2.0, gaps_over_100ms=gaps)
    return TurnRow(
        user=0,
        turn=0,
        clip="a",
        response_gap_s=0,
        start_s=start_s,
        end_s=start_s + 9,
        record=record,
    )


def test_turns_count_where_the_user_stops_speaking():
    found = spans([turn(0.0), turn(7.9), turn(8.0, gaps=1), turn(9.0)], 10.0)
    assert [(one.begin_s, one.turns, one.continuity) for one in found] == [(0, 2, 1), (10, 2, 0.5)]


def test_failed_turns_are_counted_beside_the_responses():
    [found] = spans([turn(0.0), turn(1.0, status="refused")], 10.0)
    assert (found.turns, found.failed, found.continuity) == (2, 1, 1.0)


def test_spans_without_turns_have_no_continuity():
    found = spans([turn(25.0)], 10.0)
    assert [(one.turns, one.continuity) for one in found] == [(0, None), (0, None), (1, 1.0)]
    assert spans([], 10.0) == []


@pytest.mark.parametrize(
    ("times_s", "most"), [([], 0), ([(0, 2), (1, 3), (2, 4)], 2), ([(0, 9), (1, 2), (3, 4)], 2)]
)
def test_a_session_that_ends_makes_way_for_one_that_begins(times_s, most):
    assert most_at_once(times_s) == most
