"""Days of a fleet: arrivals, the router's choice, refusals, failures, and what they add up to."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmark.simulate import failure, fleet
from benchmark.simulate.day import FleetSpec, Quality, simulate_day
from benchmark.simulate.traffic import DAY_S, Traffic

EVEN = Traffic(np.ones(100, int), np.ones(144))
# Servers answer in 100 ms with few users, and in 300 ms with 10.
QUALITY = Quality(
    users=(2, 10),
    first_audio_ms=((100.0,) * 10, (300.0,) * 10),
    continuous=(1.0, 0.9),
    turns_per_s=(0.1, 0.1),
)
SPEC = FleetSpec(n_servers=4, most=10, session_s=300.0)


def day(spec: FleetSpec = SPEC, per_day: float = 5000.0, seed: int = 1):
    return simulate_day(EVEN.arrivals_s(per_day, seed), spec, QUALITY, seed)


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


def test_sessions_of_a_day_follow_littles_law():
    found = day()
    assert found.users_mean == pytest.approx(5000 * 300 / DAY_S, rel=0.05)
    assert found.talk_h == pytest.approx(found.users_mean * 24, rel=0.02)
    assert found.refused == found.failed == found.n_failures == 0


def test_more_users_of_a_server_wait_longer():
    few, many = day(replace(SPEC, n_servers=20)), day(replace(SPEC, n_servers=3))
    assert few.first_audio_ms[0] == 100.0 and few.continuous > many.continuous
    assert many.first_audio_ms[1] == 300.0


def test_a_fleet_that_is_too_small_refuses_the_rest():
    spacings_s = np.random.default_rng(1).exponential(DAY_S / 5000, 5000)
    found = simulate_day(np.cumsum(spacings_s), replace(SPEC, n_servers=1), QUALITY, 1)
    blocked, offered = 1.0, 5000 * 300 / DAY_S
    for places in range(1, 11):  # Erlang's loss formula
        blocked = offered * blocked / (places + offered * blocked)
    assert found.refused == pytest.approx(blocked, abs=0.03)
    assert found.users_most == 10


def test_failures_fail_the_turns_of_their_servers_while_they_are_down():
    found = day(replace(SPEC, between_failures_s=1800.0, restart_s=30.0))
    # Each of them is down for 30 s of half an hour, and keeps its sessions meanwhile.
    assert found.failed == pytest.approx(30 / 1800, rel=0.3)
    assert found.n_failures > 0


def test_points_between_those_of_the_table_are_interpolated():
    turns = QUALITY.turns(np.array([0.0] * 6 + [100.0]))  # 100 s with 6 users
    assert turns == pytest.approx([5.0, 5.0])
    assert QUALITY.first_audio_quantile_ms(turns, 0.4) == 100.0
    assert QUALITY.first_audio_quantile_ms(turns, 0.6) == 300.0


def test_a_fleet_grows_by_servers_until_no_more_are_refused():
    config = fleet.parse_args(["--users", "60", "--points", "2,10", "--most", "10", "--price", "2"])
    grown = fleet.grow(config, QUALITY, Traffic.load(), 60)
    assert 6 <= grown.n_servers <= 10 and grown.n_gpus == grown.n_servers
    assert grown.day.refused <= 0.001 and math.isfinite(grown.price_per_talk_h)
    assert grown.with_failures.arrivals == grown.day.arrivals
    text = fleet.table([grown])
    assert text.splitlines()[-1].startswith(f"| 60 | {grown.n_servers} |")


def test_a_small_fleet_from_flags_to_its_document(tmp_path, capsys):
    path = tmp_path / "fleet.json"
    argv = ["--users", "10", "--points", "2,3", "--most", "3", "--json", str(path)]
    assert fleet.main(argv) == 0
    assert "| 10 |" in capsys.readouterr().out
    assert '"second_counts"' not in path.read_text() and path.read_text().count('"users"') >= 3


@pytest.mark.parametrize("argv", [["--points", "8"], ["--points", "8,4"], ["--most", "90"]])
def test_flags_of_a_fleet_are_checked(argv):
    with pytest.raises(SystemExit):
        fleet.parse_args(argv)


def test_one_failure_is_measured_with_every_turn():
    config = failure.parse_args(["--users", "4", "--restart-s", "10"])
    thinker, talker = (failure.measure(config, stage) for stage in ("thinker", "talker"))
    assert thinker.failed >= 4 and talker.failed >= 4
    assert thinker.rebuilt == 4 > talker.rebuilt
    assert 0 < thinker.before_ms < 1000 and 0 < thinker.after_ms < 2000
