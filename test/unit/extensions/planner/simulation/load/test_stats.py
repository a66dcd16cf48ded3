import pytest

from sglang_live.extensions.planner.simulation.load.stats import (
    Distribution,
    RunTotals,
    capacity,
    is_useful,
    percentile,
    point_stats,
    useful_rps,
    viable_rps,
    waste,
)
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord


def turn(ttfp_ms=900.0, **changes):
    lived = {
        "kind": "speech",
        "status": "completed",
        "ttfp_ms": ttfp_ms,
        "end_of_turn_ms": 500.0,
        "audio_s": 2.0,
        "generation_s": 1.0,
    }
    return TurnRecord(**{**lived, **changes})


def barged(**changes):
    lived = {"interruption": "barge_in", "status": "cancelled", "cut_short": True}
    return turn(**{**lived, "heard_in_all_s": 0.5, **changes})


def totals(wall_s=10.0, cpu_s=4.0, peak_rss_mib=100.0, late_frames=0.0, **more):
    known = {"wall_s": wall_s, "cpu_s": cpu_s, "peak_rss_mib": peak_rss_mib}
    return RunTotals(**known, late_frames=late_frames, **more)


def stats(records, runs=None, sessions=1, rate_rps=None):
    return point_stats("off", sessions, records, runs or [totals()], rate_rps)


@pytest.mark.parametrize(("p", "enough"), [(50, 5), (90, 10), (95, 20), (99, 100)])
def test_a_percentile_is_none_below_the_count_that_it_needs(p, enough):
    assert percentile([1.0] * (enough - 1), p) is None
    assert percentile([1.0] * enough, p) == 1.0


def test_percentiles_interpolate_between_ranks():
    assert percentile([0.0, 1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert percentile([float(i) for i in range(11)], 90) == pytest.approx(9.0)


def test_unknown_times_do_not_enter_a_distribution():
    assert Distribution.of([None, 1.0, None]).n == 1


def test_failed_turns_count_against_the_rates_but_not_in_the_times():
    point = stats([turn() for _ in range(10)] + [turn(status="failed", ttfp_ms=9e9)] * 2)
    assert (point.completed, point.failed) == (10, 2)
    assert point.ttfp_ms.n == 10
    assert point.ttfp_ms.p90 == 900.0
    assert point.turns_per_s == pytest.approx(1.0)
    assert point.within_slo is False, "a point with failures is not within the SLO"


def test_continuity_is_the_share_of_turns_without_an_audible_gap():
    assert stats([turn()] * 3 + [turn(gaps_over_100ms=2)]).continuity == 0.75
    assert stats([]).continuity is None


def test_a_useful_turn_is_fast_continuous_and_completed():
    assert is_useful(turn(ttfp_ms=999.0))
    assert not is_useful(turn(ttfp_ms=1001.0)), "501 ms after the 500 ms of detection"
    assert not is_useful(turn(gaps_over_100ms=1))
    assert not is_useful(turn(status="cancelled"))
    assert is_useful(turn(ttfp_ms=400.0, end_of_turn_ms=None)), "no detection, no allowance"


def test_the_slo_is_unknown_with_too_few_turns():
    assert stats([turn()] * 9).within_slo is None
    assert stats([turn()] * 10).within_slo is True
    assert stats([turn(ttfp_ms=1100.0)] * 10).within_slo is False


def test_repeats_add_up():
    point = stats([turn()] * 10, [totals(), totals(peak_rss_mib=300.0)])
    assert point.runs == 2
    assert point.turns_per_s == pytest.approx(0.5)
    assert point.cpu_s_per_audio_s == pytest.approx(8.0 / 20.0)
    assert point.peak_rss_mib == 300.0
    assert point.rtf.p50 == pytest.approx(0.5)


def test_capacity_is_the_largest_point_within_the_slo():
    good = [stats([turn()] * 10, sessions=n) for n in (1, 4)]
    bad = stats([turn(ttfp_ms=2000.0)] * 10, sessions=8)
    assert capacity([*good, bad]) == 4
    assert capacity([bad]) is None


def test_useful_rps_takes_smooth_points_only():
    smooth = stats([turn()] * 10)
    broken = stats([turn(gaps_over_100ms=1)] * 100)
    assert useful_rps([smooth, broken]) == pytest.approx(1.0)
    assert useful_rps([broken]) is None


def test_interrupted_turns_are_reported_separately():
    records = [turn()] * 10 + [barged(gaps_over_100ms=1, stop_latency_ms=120.0)] * 5
    point = stats(records, [totals(barge_ins_planned=6)])
    assert point.completed == 15
    assert (point.barge_ins, point.barge_ins_planned) == (5, 6)
    assert point.continuity == 1.0
    assert point.barged_continuity == 0.0
    assert point.rtf.n == 10
    assert point.ttfp_ms.n == 15, "their first audio came as any other"
    assert point.stop_latency_ms.p50 == 120.0
    assert point.wrong_interruptions == 0
    assert point.within_slo is True


def test_a_response_interrupted_by_a_noise_is_a_wrong_interruption_and_not_useful():
    noise = {"interruption": "false_trigger", "status": "cancelled"}
    wrong = turn(**noise, cut_short=True)
    ignored = turn(interruption="false_trigger")
    point = stats([wrong, ignored, turn()])
    assert (point.false_triggers, point.wrong_interruptions) == (2, 1)
    assert point.failed == 0
    assert not is_useful(wrong)
    assert is_useful(ignored)


def test_waste_is_known_only_if_every_run_counted_frames():
    heard = [turn(heard_in_all_s=2.0)] * 4
    counted, silent = totals(talker_frames=125), totals()
    assert stats(heard, [counted]).waste == pytest.approx(0.2)
    assert stats(heard, [counted, silent]).waste is None


def test_viability_is_the_share_of_packets_in_time():
    point = stats([turn(chunks_due=9, chunks_on_time=9), turn(chunks_due=1, chunks_on_time=0)])
    assert point.viability == pytest.approx(0.9)
    assert stats([turn()]).viability is None


def test_an_open_loop_is_viable_up_to_the_highest_rate_served_in_time():
    good = {"chunks_due": 10, "chunks_on_time": 10}
    slow = stats([turn(**good)] * 10, rate_rps=0.5)
    fast = stats([turn(**good)] * 10, rate_rps=1.0)
    late = stats([turn(chunks_due=10, chunks_on_time=9)] * 10, rate_rps=2.0)
    assert viable_rps([slow, fast, late]) == 1.0
    assert viable_rps([late]) is None


def test_a_refused_turn_is_a_failure_without_times():
    point = stats([turn(status="refused", ttfp_ms=None)] + [turn()] * 5)
    assert (point.refused, point.failed, point.ttfp_ms.n) == (1, 1, 5)


def test_waste_is_the_share_of_generated_audio_that_is_not_played():
    # 100 frames of 80 ms are 8 s.
    assert waste(6.0, 100) == pytest.approx(0.25)
    assert waste(6.0, None) is None
    assert waste(0.0, 0) is None
