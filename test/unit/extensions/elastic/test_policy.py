"""Memory moves to the pool that needs it, and returns when it has not been needed for a minute."""

import random
from dataclasses import replace

import pytest

from sglang_live.extensions.elastic.policy import (
    ElasticConfig,
    Move,
    PeakWindow,
    PoolView,
    decide,
    spare_for_requests,
    spare_for_sessions,
)

CONFIG = ElasticConfig()
IDLE = PoolView(
    size=1000, start=1000, floor=100, limit=16_000, needed=0, wished=0, peak_needed=0, peak_wished=0
)


def pool(**changes) -> PoolView:
    """A pool whose peaks are what it needs now, unless they are given."""
    view = replace(IDLE, **changes)
    wished = max(view.wished, view.needed)
    peaks = {"peak_needed": view.needed, "peak_wished": wished}
    return replace(view, **(peaks | changes | {"wished": wished}))


def test_pools_with_enough_keep_what_they_have():
    assert decide((pool(needed=900), pool(needed=900)), CONFIG) is None


@pytest.mark.parametrize("receiver", [0, 1])
def test_waiting_requests_get_exactly_what_they_lack(receiver):
    pools = [pool(), pool()]
    pools[receiver] = pool(needed=1300)
    assert decide(tuple(pools), CONFIG) == Move(receiver, 300, urgent=True)


def test_a_giver_keeps_its_floor_and_the_largest_need_of_the_window():
    asks = pool(needed=5000)
    assert decide((asks, pool()), CONFIG) == Move(0, 900, urgent=True)
    assert decide((asks, pool(peak_needed=600)), CONFIG) == Move(0, 400, urgent=True)
    assert decide((asks, pool(peak_needed=1000)), CONFIG) is None


def test_idle_sessions_do_not_keep_memory_from_requests():
    asks, full_of_idle = pool(needed=1500), pool(needed=100, wished=1000)
    assert decide((asks, full_of_idle), CONFIG) == Move(0, 500, urgent=True)
    assert spare_for_sessions(full_of_idle, CONFIG) == 0


def test_idle_sessions_get_what_the_other_pool_does_not_use():
    move = decide((pool(needed=100, wished=950), pool()), CONFIG)
    assert move == Move(0, int(950 / 0.875) - 1000, urgent=False)
    assert decide((pool(wished=950), pool(wished=950)), CONFIG) is None


def test_a_pool_takes_no_more_than_its_address_space_holds():
    assert decide((pool(needed=9000, limit=1010), pool()), CONFIG) == Move(0, 10, urgent=True)
    assert decide((pool(needed=9000, limit=1000), pool()), CONFIG) is None


def test_received_memory_returns_when_the_window_has_not_needed_it():
    has, gave = pool(size=1600), pool(size=400)
    assert decide((has, gave), CONFIG) == Move(1, 600, urgent=False)
    assert decide((replace(has, peak_wished=1400), gave), CONFIG) is None
    assert decide((replace(has, peak_wished=1200), gave), CONFIG) == Move(
        1, 1600 - int(1200 / 0.875) - int(2000 * 0.03125), urgent=False
    )


def test_what_returns_is_not_asked_for_again():
    """Hysteresis: with the same needs, the moves end."""
    rng = random.Random(4)
    for _ in range(2000):
        sizes = [rng.randrange(100, 4000), rng.randrange(100, 4000)]
        pools = [
            pool(
                size=size,
                start=sum(sizes) // 2,
                floor=rng.randrange(100),
                needed=(needed := rng.randrange(2500)),
                wished=needed + rng.randrange(2500),
            )
            for size in sizes
        ]
        moves: list[Move] = []
        while (move := decide((pools[0], pools[1]), CONFIG)) is not None:
            moves.append(move)
            assert len(moves) < 12, (sizes, moves)
            to, giver = pools[move.receiver], pools[1 - move.receiver]
            assert 0 < move.granules <= giver.size - giver.floor
            pools[move.receiver] = replace(to, size=to.size + move.granules)
            pools[1 - move.receiver] = replace(giver, size=giver.size - move.granules)
        assert sum(one.size for one in pools) == sum(sizes)
        if moves:
            # None goes to and fro but for requests that wait.
            unhurried = {move.receiver for move in moves if not move.urgent}
            assert len(unhurried) < 2, moves


def test_spare_memory_is_never_negative():
    short = pool(size=50, needed=500)
    assert spare_for_requests(short) == spare_for_sessions(short, CONFIG) == 0


def test_a_window_holds_the_largest_value_until_it_is_old():
    rng, window, seen = random.Random(5), PeakWindow(10.0), []
    for now_s in range(200):
        value = rng.randrange(100)
        window.add(float(now_s), value)
        seen.append((now_s, value))
        assert window.peak(float(now_s)) == max(v for at, v in seen if at >= now_s - 10)
    assert PeakWindow(10.0).peak(0.0) == 0


def test_a_window_keeps_its_newest_value():
    window = PeakWindow(10.0)
    window.add(0.0, 7)
    assert window.peak(1000.0) == 7


def test_constants_out_of_range_are_refused():
    with pytest.raises(ValueError, match="elastic_window_s"):
        ElasticConfig(elastic_window_s=0)
    with pytest.raises(ValueError, match="slack_share"):
        ElasticConfig(slack_share=0.01)
