"""Pools that fill are forecast, and pools that only go up and down are not."""

import math
import random

import pytest

from sglang_live.capacity.forecast import PoolForecast


def observed(shares, n_sessions=lambda now_s: 10) -> PoolForecast:
    """shares: (time in seconds, share), one sample every 2 s."""
    forecast = PoolForecast()
    for now_s, share in shares:
        forecast.observe(now_s, share, n_sessions(now_s))
    return forecast


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_forecast_of_a_pool_that_fills_is_right_within_ten_percent(noise):
    rng = random.Random(1)
    forecast = observed((t, 0.1 + 0.004 * t + rng.uniform(-noise, noise)) for t in range(0, 100, 2))
    assert forecast.saturates_in_s() == pytest.approx((0.9 - 0.004 * 98) / 0.004, rel=0.1)


def test_more_sessions_fill_it_sooner():
    forecast = observed((t, 0.1 + 0.001 * t) for t in range(0, 60, 2))
    assert forecast.rate == pytest.approx(0.0001)
    assert forecast.saturates_in_s(20) == pytest.approx(forecast.saturates_in_s(10) / 2)
    assert forecast.most_sessions(forecast.saturates_in_s(20)) == pytest.approx(20)


def test_the_rate_per_session_does_not_change_when_sessions_are_added():
    share, shares = 0.0, []
    for t in range(0, 60, 2):
        shares.append((t, share))
        share += 2 * (1 + t // 10) * 0.0005
    forecast = observed(shares, n_sessions=lambda now_s: 1 + now_s // 10)
    assert forecast.rate == pytest.approx(0.0005)


def test_growth_without_sessions_is_forecast_as_that_of_one():
    """Requests of SGLang's own API have no sessions."""
    forecast = observed(((t, 0.1 + 0.001 * t) for t in range(0, 60, 2)), n_sessions=lambda now_s: 0)
    assert forecast.saturates_in_s() == pytest.approx((0.9 - 0.058) / 0.001)


@pytest.mark.parametrize("seed", range(20))
def test_turns_that_begin_and_end_are_no_growth(seed):
    rng = random.Random(seed)
    forecast = observed((t, 0.5 + rng.uniform(-0.2, 0.2)) for t in range(0, 60, 2))
    assert forecast.saturates_in_s() > 60


def test_bounded_sessions_stop_growing():
    forecast = observed((t, min(0.5, 0.02 * t)) for t in range(0, 200, 2))
    assert forecast.saturates_in_s() == math.inf
    assert forecast.share == 0.5


def test_a_full_pool_is_full_now():
    forecast = observed((t, 1.0) for t in range(0, 60, 2))
    assert forecast.saturates_in_s() == 0.0


def test_a_few_samples_are_no_forecast():
    forecast = observed((t, 0.1 * t) for t in range(0, 8, 2))
    assert forecast.saturates_in_s() == math.inf


# --- boundaries ---


def test_eight_samples_are_enough():
    assert observed((t, 0.01 * t) for t in range(0, 14, 2)).rate == 0.0
    assert observed((t, 0.01 * t) for t in range(0, 16, 2)).rate == pytest.approx(0.001)


@pytest.mark.parametrize(("certain", "grows"), [(3.05, True), (2.95, False)])
def test_growth_is_certain_from_three_standard_errors_on(certain, grows):
    # Orthogonal to a line over eight looks, and 8 in square: the rest has 6 degrees of freedom.
    noise = (1, -1, -1, 1, 1, -1, -1, 1)
    error = 1e-3 * math.sqrt(8 / 6 / 168)
    shares = [(2 * n, 0.1 + certain * error * 2 * n + 1e-3 * noise[n]) for n in range(8)]
    forecast = observed(shares, n_sessions=lambda now_s: 1)
    assert (forecast.rate > 0) == grows
    assert not grows or forecast.rate == pytest.approx(certain * error)


def test_samples_of_the_latest_minute_count():
    forecast = observed((t, 0.1) for t in range(0, 122, 2))
    assert [at_s for at_s, _, _ in forecast._samples] == [*range(60, 122, 2)]


def test_session_seconds_are_those_before_a_sample():
    forecast = PoolForecast()
    for n in range(10):
        forecast.observe(2.0 * n, 0.01 * n, 1 + n)
    assert [session_s for _, session_s, _ in forecast._samples][:4] == [0.0, 2.0, 6.0, 12.0]


def test_a_pool_that_does_not_grow_takes_any_number_of_sessions():
    forecast = observed((t, 0.5) for t in range(0, 60, 2))
    assert forecast.most_sessions(30.0) == forecast.saturates_in_s(5) == math.inf


def test_no_sessions_count_as_one():
    forecast = observed((t, 0.1 + 0.001 * t) for t in range(0, 60, 2))
    assert forecast.saturates_in_s(0) == forecast.saturates_in_s(1)
    assert forecast.saturates_in_s(1) == pytest.approx((0.9 - 0.058) / 0.0001)
