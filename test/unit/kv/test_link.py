"""The measured speed of a link."""

import pytest

from sglang_live.kv.link import Link, LinkConfig

MB = 1 << 20


def test_nothing_is_known_before_the_first_transfer():
    link = Link()
    assert (link.bytes_per_s, link.latency_s) == (None, 0.0)


def test_small_transfers_measure_the_fixed_cost_and_large_ones_the_bandwidth():
    link = Link(LinkConfig(min_bytes=MB))
    link.finished(MB - 1, 0.001)
    assert (link.bytes_per_s, link.latency_s) == (None, 0.001)
    link.finished(100 * MB, 0.1)
    assert link.bytes_per_s == pytest.approx(1000 * MB)
    assert link.latency_s == 0.001


def test_it_follows_the_present_bandwidth():
    link = Link()
    link.finished(100 * MB, 0.01)
    for _ in range(30):
        link.finished(100 * MB, 0.1)
    assert link.bytes_per_s == pytest.approx(1000 * MB, rel=0.02)


def test_one_slow_transfer_counts_more_than_one_fast_one():
    slow, fast = Link(), Link()
    for link, seconds in ((slow, 0.2), (fast, 0.05)):
        link.finished(100 * MB, 0.1)
        link.finished(100 * MB, seconds)
    assert 1 - slow.bytes_per_s / (1000 * MB) > fast.bytes_per_s / (1000 * MB) - 1


@pytest.mark.parametrize(("n_bytes", "seconds"), [(0, 1.0), (MB, 0.0), (MB, -1.0)])
def test_transfers_without_bytes_or_time_are_ignored(n_bytes, seconds):
    link = Link()
    link.finished(n_bytes, seconds)
    assert (link.bytes_per_s, link.latency_s) == (None, 0.0)


@pytest.mark.parametrize("bad", [{"weight": 0.0}, {"weight": 1.5}, {"min_bytes": 0}])
def test_bad_constants_are_refused(bad):
    with pytest.raises(ValueError):
        LinkConfig(**bad)


def test_a_transfer_of_the_least_size_measures_the_bandwidth():
    link = Link(LinkConfig(min_bytes=MB))
    link.finished(MB, 0.001)
    assert (link.bytes_per_s, link.latency_s) == (pytest.approx(1000 * MB), 0.0)
    link.finished(1, 0.5)
    assert link.latency_s == 0.5


def test_both_averages_move_by_the_weight():
    link = Link(LinkConfig(weight=0.25, min_bytes=MB))
    for seconds in (0.5, 1.0):
        link.finished(1, seconds)
        link.finished(MB, seconds)
    assert link.latency_s == 0.625
    assert link.bytes_per_s == pytest.approx(MB / 0.625)


@pytest.mark.parametrize("edge", [{"weight": 1.0}, {"min_bytes": 1}])
def test_constants_at_their_bounds_are_accepted(edge):
    assert LinkConfig(**edge)
