"""The wish for hosts: ahead of the calls, over the zones, and steady."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.capacity.scaling import (
    FleetNow,
    GatewayLoad,
    Host,
    PoolPlan,
    Scaling,
    ScalingConfig,
    StageLoad,
)

ZONES = ("a", "b", "c")
CONFIG = ScalingConfig(
    pools={
        "thinkers": PoolPlan(stages=("thinker", "vocoder"), sessions=40, cold_start_s=240.0),
        "talkers": PoolPlan(stages=("talker",), sessions=60, cold_start_s=120.0),
    }
)


def load(n_open: int, arrivals_per_s: float = 0.0, **values) -> GatewayLoad:
    known = {"limit": n_open + 10, "why": "", "share": 0.5, "ends_per_s": 0.0}
    return GatewayLoad(n_open=n_open, arrivals_per_s=arrivals_per_s, **{**known, **values})


def fleet(*gateways: GatewayLoad, hosts=(), stages=None, zones=ZONES) -> FleetNow:
    return FleetNow(gateways=gateways, stages=stages or {}, hosts=hosts, zones=zones)


def of_zone(pool: str, zone: str, *n_open: int, **values) -> list[Host]:
    return [
        Host(name=f"{pool}-{zone}{n}", pool=pool, zone=zone, n_open=one, **values)
        for n, one in enumerate(n_open)
    ]


def totals(now: FleetNow, config: ScalingConfig = CONFIG) -> dict[str, int]:
    wish = Scaling(config).wish(0.0, now)
    return {pool: sum(zones.values()) for pool, zones in wish.hosts.items()}


loads = st.builds(
    load,
    n_open=st.integers(0, 5000),
    arrivals_per_s=st.floats(0, 50),
    ends_per_s=st.floats(0, 50),
)
fleets = st.builds(
    lambda gateways, n_zones: fleet(*gateways, zones=ZONES[:n_zones]),
    st.lists(loads, min_size=1, max_size=4),
    st.integers(1, 3),
)


@given(fleets)
def test_the_wish_is_never_below_what_is_open(now):
    wish = Scaling(CONFIG).wish(0.0, now)
    n_open = sum(one.n_open for one in now.gateways)
    for pool, zones in wish.hosts.items():
        assert sum(zones.values()) * CONFIG.pools[pool].sessions * CONFIG.fill >= n_open
        assert max(zones.values()) - min(zones.values()) <= 1


@given(fleets)
def test_the_loss_of_a_zone_is_covered(now):
    wish = Scaling(CONFIG).wish(0.0, now)
    n_open = sum(one.n_open for one in now.gateways)
    for pool, zones in wish.hosts.items():
        if len(zones) > 1:
            rest = sum(zones.values()) - max(zones.values())
            assert rest * CONFIG.pools[pool].sessions >= n_open


def test_the_reserve_is_in_use_while_a_zone_is_out():
    left = replace(fleet(load(400), zones=ZONES[:2]), lost=ZONES[2:])
    assert totals(left)["thinkers"] == 12 + 2 < totals(replace(left, lost=()))["thinkers"] == 20


@given(fleets, st.floats(0, 20))
def test_more_arrivals_never_mean_fewer_hosts(now, more):
    first, *others = now.gateways
    busier = replace(first, arrivals_per_s=first.arrivals_per_s + more)
    few, many = totals(now), totals(replace(now, gateways=(busier, *others)))
    assert all(many[pool] >= few[pool] for pool in few)


@given(st.lists(st.tuples(st.floats(1, 400), st.integers(0, 3000)), min_size=1, max_size=40))
def test_it_shrinks_only_to_what_was_enough_for_ten_minutes(steps):
    """So no host that is released was needed within that time."""
    scaling, now_s, seen = Scaling(CONFIG), 0.0, []
    for step_s, n_open in steps:
        now_s += step_s
        now = fleet(load(n_open))
        seen.append((now_s, totals(now)))
        wish = scaling.wish(now_s, now)
        for pool, zones in wish.hosts.items():
            recent = [needed[pool] for at_s, needed in seen if at_s >= now_s - CONFIG.shrinks_s]
            assert sum(zones.values()) == max(recent)


def test_calls_that_come_within_a_cold_start_count():
    assert totals(fleet(load(400)), replace(CONFIG, covers_zone=False)) == {
        "thinkers": 12 + 3,
        "talkers": 8 + 3,
    }
    growing = fleet(load(400, arrivals_per_s=1.5, ends_per_s=0.5))
    # 240 more for thinkers, 120 for talkers, which start in half the time.
    assert totals(growing, replace(CONFIG, covers_zone=False)) == {
        "thinkers": 19 + 3,
        "talkers": 11 + 3,
    }


def test_the_pool_whose_stage_takes_most_of_its_budget_is_first():
    slow = {"thinker": StageLoad(p90_s=0.1), "talker": StageLoad(p90_s=0.2)}
    assert next(iter(Scaling(CONFIG).wish(0.0, fleet(load(10), stages=slow)).hosts)) == "talkers"
    filled = slow | {"thinker": StageLoad(p90_s=0.1, pool_share=0.9)}
    assert next(iter(Scaling(CONFIG).wish(0.0, fleet(load(10), stages=filled)).hosts)) == "thinkers"


def full_fleet() -> FleetNow:
    """Two talkers of 40 calls, for 60 by the plan, which two gateways find enough."""
    hosts = of_zone("talkers", "a", 40, 40) + of_zone("thinkers", "a", 40, 40)
    late = load(40, limit=40, why="40 sessions, and 40 can be served in time", share=0.97)
    return fleet(late, late, hosts=hosts, stages={"talker": StageLoad(p90_s=0.4)}, zones=("a",))


def test_the_pool_that_holds_gateways_up_grows_although_the_plan_says_it_is_enough():
    wish = Scaling(CONFIG).wish(0.0, full_fleet())
    assert wish.hosts == {"talkers": {"a": 4}, "thinkers": {"a": 4}}
    # A fall of the limit in itself says nothing of hosts: this one is early, and still rises.
    early = fleet(*(replace(one, share=0.2) for one in full_fleet().gateways), zones=("a",))
    assert totals(early) == {"thinkers": 4, "talkers": 3}


def test_lateness_that_hosts_do_not_cure_buys_twice_the_plan_at_most():
    scaling, now = Scaling(CONFIG), full_fleet()
    for n in range(100):
        empty = of_zone("talkers", "a", *([1] * n))
        wish = scaling.wish(10.0 * n, replace(now, hosts=(*empty, *now.hosts)))
    assert wish.hosts["talkers"] == {"a": 4 + 1}


def test_a_pool_that_has_rested_is_trusted_with_its_plan_again():
    scaling = Scaling(CONFIG)
    scaling.wish(0.0, full_fleet())
    at_rest = fleet(load(80), zones=("a",))
    wishes = [scaling.wish(600.0 * n, at_rest).hosts["talkers"]["a"] for n in range(1, 40)]
    assert wishes[0] == 4 and wishes[-1] == totals(at_rest)["talkers"] == 3
    assert wishes == sorted(wishes, reverse=True)


def test_one_sick_gateway_does_not_set_the_size_of_the_fleet():
    sick = load(2, limit=2, why="2 sessions, and 2 can be served in time", share=3.0)
    well = [load(30) for _ in range(19)]
    hosts = of_zone("talkers", "a", *([30] * 20))
    stages = {"talker": StageLoad(p90_s=0.2)}
    assert totals(fleet(sick, *well, hosts=hosts, stages=stages, zones=("a",)))["talkers"] == 13


def test_the_emptiest_hosts_of_a_zone_drain():
    hosts = of_zone("thinkers", "a", 9, 1, 5) + of_zone("talkers", "a", 15)
    config = replace(CONFIG, spare=0)
    now = fleet(load(15), hosts=hosts, zones=("a",))
    assert Scaling(config).wish(0.0, now).drain == ("thinkers-a1", "thinkers-a2")
    # Those that are at it go on, if they still may.
    begun = [replace(one, state="draining") if one.n_open == 9 else one for one in hosts]
    now = replace(now, gateways=(load(35),), hosts=begun)
    assert Scaling(config).wish(0.0, now).drain == ("thinkers-a0",)
    now = replace(now, gateways=(load(100),))
    assert Scaling(config).wish(0.0, now).drain == ()


def test_hosts_of_a_zone_stay_until_those_of_another_serve():
    """A zone that is back has its hosts in place before the others give up theirs."""
    crowded = of_zone("thinkers", "a", 20, 20, 20) + of_zone("thinkers", "b", 20, 20, 20)
    starting = of_zone("thinkers", "c", 0, state="starting")
    config = replace(CONFIG, spare=0)
    now = fleet(load(120), hosts=crowded + starting)
    assert totals(now, config)["thinkers"] == 5
    assert len(Scaling(config).wish(0.0, now).drain) == 1
    serving = [replace(one, state="up") for one in starting]
    now = replace(now, hosts=crowded + serving)
    wish = Scaling(config).wish(0.0, now)
    assert len(wish.drain) == 2
    for zone, n in wish.hosts["thinkers"].items():
        left = [one for one in now.hosts if one.zone == zone and one.name not in wish.drain]
        assert len(left) == n


@given(st.lists(st.tuples(st.sampled_from(ZONES), st.integers(0, 40)), max_size=30))
def test_what_is_left_serves_what_is_open(hosts):
    known = [
        Host(name=str(n), pool="thinkers", zone=zone, n_open=n_open)
        for n, (zone, n_open) in enumerate(hosts)
    ]
    now = fleet(load(sum(one.n_open for one in known)), hosts=known)
    drain = Scaling(CONFIG).wish(0.0, now).drain
    left = [one for one in known if one.name not in drain]
    if drain:
        assert len(left) * CONFIG.pools["thinkers"].sessions >= now.gateways[0].n_open
        assert len(left) >= totals(now)["thinkers"]


def test_a_fleet_without_zones_and_a_host_of_no_pool_are_refused():
    with pytest.raises(ValueError, match="zones"):
        Scaling(CONFIG).wish(0.0, fleet(load(1), zones=()))
    with pytest.raises(ValueError, match="pools"):
        Scaling(CONFIG).wish(0.0, fleet(load(1), hosts=of_zone("elsewhere", "a", 1)))
