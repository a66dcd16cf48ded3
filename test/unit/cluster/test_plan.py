"""What a cluster does next: new ones first, never too few, and no gateway without its stages."""

import random
from dataclasses import replace

import pytest

from sglang_live.cluster.plan import Placed, Steps, Wanted, next_steps

NOW, BEFORE = "now", "before"


def want(n: int = 1, spare: int = 0, **changes) -> Wanted:
    given = {"group": "voice", "zone": "a", "needed": n, "total": n + spare, "generation": NOW}
    return Wanted(**given | changes)


def host(name: str, generation: str = NOW, **changes) -> Placed:
    given = {"group": "voice", "zone": "a", "protocol": "p", "is_up": True, "drains": False}
    return Placed(name=name, generation=generation, **given | changes)


def steps(wanted: list[Wanted], placed: list[Placed], protocol: str = "p") -> Steps:
    return next_steps(wanted, placed, gateways="gateways", protocol=protocol)


def test_what_is_missing_is_started_also_the_spare_ones_and_in_every_zone():
    wanted = [want(2, 1), want(1, zone="b")]
    assert steps(wanted, [host("0")]) == Steps(start=[wanted[0], wanted[0], wanted[1]])


def test_nothing_is_done_to_what_is_as_wanted():
    assert steps([want(2)], [host("0"), host("1")]) == Steps()


def test_one_that_is_down_for_a_while_is_not_replaced():
    assert steps([want(2)], [host("0", is_up=False), host("1")]) == Steps()


def test_one_that_drains_is_replaced():
    assert steps([want(1)], [host("0", drains=True)]).start == [want(1)]


def test_an_old_one_drains_when_the_new_one_is_up():
    old, new = host("old", BEFORE), host("new", is_up=False)
    assert steps([want(1)], [old]) == Steps(start=[want(1)])
    assert steps([want(1)], [old, new]) == Steps()
    assert steps([want(1)], [old, replace(new, is_up=True)]) == Steps(drain=["old"])


def test_with_a_spare_one_an_old_one_makes_room_for_the_first_new_one():
    old = [host(name, BEFORE) for name in ("0", "1")]
    new = [host(name, is_up=False) for name in ("2", "3")]
    assert steps([want(1, 1)], [*old, *new]) == Steps(drain=["0"])


def test_one_drains_at_a_time():
    old = [host("0", BEFORE, drains=True), host("1", BEFORE)]
    assert steps([want(1, 2)], [*old, *(host(n) for n in "234")]).drain == []


def test_of_many_a_twentieth_is_replaced_at_a_time_and_growth_does_not_wait():
    old = [host(str(n), BEFORE) for n in range(40)]
    few = steps([want(38, 2)], old)
    assert (len(few.start), few.drain) == (2, ["0", "1"])
    begun = [*old, host("40", is_up=False), host("41", is_up=False)]
    assert steps([want(40)], begun) == Steps()
    assert len(steps([want(60)], begun).start) == 21
    # Old gateways keep them all: the new ones come beside them.
    gateway = host("g", BEFORE, group="gateways", zone="", protocol="before")
    kept = [replace(one, protocol="before") for one in old]
    both = steps([want(40)], [gateway, *kept], "now")
    assert (len(both.start), both.drain) == (40, [])


def test_an_old_one_that_does_not_serve_goes_first_and_at_once():
    old = [host("0", BEFORE), host("1", BEFORE, is_up=False)]
    assert steps([want(1)], [*old, host("2", is_up=False)]).drain == ["1"]


def test_of_too_many_the_last_ones_go():
    assert steps([want(1)], [host("full"), host("empty")]).drain == ["empty"]
    assert steps([want(1)], [host("full", is_up=False), host("empty")]).drain == ["full"]


def test_a_removed_group_goes_when_all_others_serve():
    old = host("old", group="all")
    assert steps([want(1)], [old]) == Steps(start=[want(1)])
    assert steps([want(1)], [old, host("0", is_up=False)]).drain == []
    assert steps([want(1)], [old, host("0")]).drain == ["old"]


def test_old_gateways_keep_the_stages_of_their_protocol():
    wanted = [want(1), want(1, group="gateways", zone="")]
    old = host("old", BEFORE, protocol="before")
    gateway = replace(old, name="gateway", group="gateways", zone="")
    new = [host("0", protocol="now"), host("g", group="gateways", zone="", protocol="now")]
    assert steps(wanted, [old, gateway, *new], "now").drain == ["gateway"]
    draining = replace(gateway, drains=True)
    assert steps(wanted, [old, draining, *new], "now").drain == []
    assert steps(wanted, [old, *new], "now").drain == ["old"]


@pytest.mark.parametrize("seed", range(20))
def test_a_rollout_ends_and_never_has_fewer_than_are_needed(seed):
    """On machines that may have no room for more than there are."""
    draws = random.Random(seed)
    needed, spare, more = draws.randint(1, 4), draws.randint(0, 2), draws.randint(0, 2)
    more = max(more, 1 - spare)
    wanted = [want(needed, spare), want(1, 1, group="gateways", zone="")]
    placed = [host(f"old-{n}", BEFORE, protocol="before") for n in range(needed + spare)]
    placed += [
        host(f"g-{n}", BEFORE, group="gateways", zone="", protocol="before") for n in range(2)
    ]
    room = needed + spare + more
    for n_steps in range(500):
        found = steps(wanted, placed, "now")
        for one in found.start:
            name = f"{one.group}-{n_steps}-{len(placed)}"
            here = {"group": one.group, "zone": one.zone, "protocol": "now"}
            placed.append(host(name, is_up=False, **here))
        placed = [replace(p, drains=p.drains or p.name in found.drain) for p in placed]
        gone = [p for p in placed if p.drains and draws.random() < 0.5]
        placed = [p for p in placed if p not in gone]
        n_voices = 0
        for at, one in enumerate(placed):
            n_voices += one.group == "voice"
            has_room = one.group == "gateways" or n_voices <= room
            if not one.is_up and has_room and draws.random() < 0.5:
                placed[at] = replace(one, is_up=True)
        for group, least in (("voice", needed), ("gateways", 1)):
            serving = [p for p in placed if p.group == group and p.is_up and not p.drains]
            assert len(serving) >= least
        bound = {p.protocol for p in placed if p.group == "gateways"}
        assert bound <= {p.protocol for p in placed if p.group == "voice" and not p.drains} | {
            "now"
        }
        if not found.start and not found.drain and all(p.generation == NOW for p in placed):
            return
    raise AssertionError(f"not within 500 steps: {placed}")
