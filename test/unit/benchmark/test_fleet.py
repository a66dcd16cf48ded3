"""Days of a fleet: arrivals, servers that come and go, and sessions that move."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmark.simulate import failure, fleet
from benchmark.simulate.day import QUANTILES, FleetSpec, Quality
from benchmark.simulate.fleet import ARMS, Job, day_of, quality_in, summary
from benchmark.simulate.traffic import DAY_S, Traffic

EVEN = Traffic(np.ones(100, int), np.ones(144))
# Servers answer in 100 ms with few sessions, and in 300 ms with 10.
QUALITY = Quality(
    users=(2, 10),
    first_audio_ms=((100.0,) * len(QUANTILES), (300.0,) * len(QUANTILES)),
    turns_per_s=(0.1, 0.1),
)
SPEC = FleetSpec(users=60, sessions=10, n_gpus=2)
FIXED, WAITS, MOVES, NO_ZONE = ARMS


def day(arm: str = MOVES, users: int = 60, traffic: Traffic = EVEN, **spec):
    return day_of(Job(users, arm, seed=1), replace(SPEC, **spec), QUALITY, traffic)


def test_arrivals_keep_the_number_and_the_shape_of_the_day():
    traffic = Traffic.load()
    times_s = traffic.arrivals_s(40_000, seed=3)
    assert len(times_s) == pytest.approx(40_000, rel=0.02)
    assert (np.diff(times_s) >= 0).all() and times_s[0] >= 0 and times_s[-1] < DAY_S
    by_hour = np.histogram(times_s, 24, (0, DAY_S))[0] / len(times_s)
    rates = traffic.window_rates.reshape(24, 6).sum(axis=1)
    assert by_hour == pytest.approx(rates / rates.sum(), abs=0.006)
    assert (traffic.arrivals_s(40_000, seed=3) == times_s).all()
    assert traffic.busiest == pytest.approx(2.6, abs=0.2)


def test_arrivals_are_burstier_than_even_ones():
    def spread(traffic: Traffic) -> float:
        counts = np.histogram(traffic.arrivals_s(86_400, seed=1), 8640, (0, DAY_S))[0]
        return float(counts.var() / counts.mean())

    real = Traffic(Traffic.load().second_counts, np.ones(144))
    assert spread(real) > 1.2 * spread(EVEN)


def test_a_calm_day_has_no_losses_and_its_sessions_follow_littles_law():
    found = day(outage_s=0.0, days_between_failures=1e9, rollout_s=1e9)
    assert found.users_most == pytest.approx(60, rel=0.4)
    assert found.arrivals == pytest.approx(60 * DAY_S / SPEC.session_s, rel=0.15)
    assert found.refused < 1 and found.failed == 0
    assert found.moved < 20 and found.of_loss == 0
    assert 100 <= found.first_audio_ms[0] <= found.first_audio_ms[2] <= 300


def test_servers_follow_the_calls_and_moves_free_them_sooner():
    traffic = Traffic.load()
    fixed, waits, moves = (day(arm, users=200, traffic=traffic) for arm in (FIXED, WAITS, MOVES))
    assert moves.gpu_hours < waits.gpu_hours < fixed.gpu_hours
    assert moves.drain_min[1] <= 2 < waits.drain_min[0]
    assert moves.moved > waits.moved == waits.of_loss > 0


def test_without_a_zone_in_reserve_fewer_servers_answer_later():
    traffic = Traffic.load()
    bare = day(NO_ZONE, users=300, traffic=traffic)
    covered = day(MOVES, users=300, traffic=traffic)
    assert covered.of_loss > 1 and covered.failed == 0
    assert bare.first_audio_ms[2] > covered.first_audio_ms[2]
    assert bare.gpu_hours < covered.gpu_hours


def test_a_rollout_replaces_every_server_and_cuts_no_one_off():
    calm = {"outage_s": 0.0, "days_between_failures": 1e9}
    rolled, still = (day(rollout_s=at_s, **calm) for at_s in (3600.0, 1e9))
    assert rolled.failed == 0 and rolled.of_loss == 0
    assert rolled.moved > still.moved
    assert rolled.gpus_most >= still.gpus_most


def test_servers_that_fail_hand_their_sessions_over():
    found = day(days_between_failures=0.5, outage_s=0.0, rollout_s=1e9)
    twice = day(days_between_failures=0.25, outage_s=0.0, rollout_s=1e9)
    none = day(days_between_failures=1e9, outage_s=0.0, rollout_s=1e9)
    assert none.of_loss == 0 < found.of_loss < twice.of_loss
    assert found.failed == twice.failed == 0


def test_points_between_those_of_the_table_are_interpolated():
    late_ms = QUALITY.at(np.array([1.0, 2.0, 6.0, 10.0, 14.0]))
    assert late_ms[:, 0].tolist() == [100.0, 100.0, 200.0, 300.0, 400.0]


def test_intervals_are_those_of_the_seeds():
    days = [day(users=60, traffic=EVEN)] * 2
    found = summary(60, MOVES, [days[0], replace(days[1], gpu_hours=days[0].gpu_hours + 2)])
    assert found.figures["gpu_hours"].mean == pytest.approx(days[0].gpu_hours + 1, abs=0.01)
    assert found.figures["gpu_hours"].within == pytest.approx(12.71, abs=0.01)
    assert found.figures["arrivals"].within == 0
    assert fleet.table([found]).splitlines()[-1].startswith("| 60 | scaled, moves |")


def test_a_small_fleet_from_flags_to_its_document(tmp_path, capsys):
    path = tmp_path / "fleet.json"
    argv = ["--users", "40", "--points", "2,3", "--sessions", "3", "--seeds", "2"]
    assert fleet.main([*argv, "--layout", "0", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("| 40 |") == len(ARMS)
    document = json.loads(path.read_text())
    assert [one["arm"] for one in document["fleets"]] == list(ARMS)
    assert document["config"]["n_gpus"] == 1
    again = tmp_path / "again.json"
    assert fleet.main([*argv, "--layout", "0", "--quality", str(path), "--json", str(again)]) == 0
    assert json.loads(again.read_text())["fleets"] == document["fleets"]
    assert quality_in(path) == quality_in(again)


@pytest.mark.parametrize(
    "argv", [["--points", "8"], ["--points", "8,4"], ["--sessions", "900"], ["--seeds", "1"]]
)
def test_flags_of_a_fleet_are_checked(argv):
    with pytest.raises(SystemExit):
        fleet.parse_args(argv)


def test_one_failure_is_measured_with_every_turn():
    config = failure.parse_args(["--users", "4", "--restart-s", "10"])
    thinker, talker = (failure.measure(config, stage) for stage in ("thinker", "talker"))
    assert thinker.failed >= 4 and talker.failed >= 4
    assert thinker.rebuilt == 4 > talker.rebuilt
    assert 0 < thinker.before_ms < 1000 and 0 < thinker.after_ms < 2000
