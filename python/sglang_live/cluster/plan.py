"""What a cluster has to do next, to have what it is to have. Pure.

New ones come first: one that is to go drains when there are enough without it, few at a time. Old
gateways are bound to stages of their own protocol, which therefore stay as long as they do.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_BATCH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Of one group in one zone.

    needed, total: how many serve at least at any time, and how many in the end.
    generation: see ClusterSpec.
    """

    group: str
    zone: str
    needed: int
    total: int
    generation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A host or gateway that was started.

    protocol: "": not known yet.
    is_up: whether it serves, or will again without being moved.
    """

    name: str
    group: str
    zone: str
    generation: str
    protocol: str
    is_up: bool
    drains: bool


@dataclass(slots=True)
class Steps:
    """start: a host or gateway of each of these, to begin with. drain: names."""

    start: list[Wanted] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)


def next_steps(
    wanted: Iterable[Wanted], placed: Iterable[Placed], *, gateways: str, protocol: str
) -> Steps:
    """
    Args:
        gateways: name of the group of gateways.
        protocol: of what is started now.
    """
    placed, steps = list(placed), Steps()
    groups = {(one.group, one.zone): one for one in wanted}
    bound = {one.protocol for one in placed if one.group == gateways and one.protocol}

    def is_bound(one: Placed) -> bool:
        return one.group != gateways and one.protocol in bound - {protocol}

    by_group = _by_group(placed)
    complete = True
    for key, want in groups.items():
        here = by_group.get(key, [])
        new = [one for one in here if one.generation == want.generation and not one.drains]
        complete &= sum(one.is_up for one in new) >= want.needed
        # Not all at once beside the old ones: that would take twice the machines.
        n_beside = want.total + _batch(want.total) - sum(not is_bound(one) for one in here)
        n_missing = want.total - sum(not one.drains for one in here)
        steps.start += [want] * min(want.total - len(new), max(n_beside, n_missing))
    for key, here in by_group.items():
        wants = groups.get(key)
        n_up = sum(one.is_up and not one.drains for one in here)
        n_more = _batch(len(here)) - sum(one.drains for one in here)
        for one in _leaving(here, wants)[: max(0, n_more)]:
            if is_bound(one):
                continue
            if not one.is_up or (complete if wants is None else n_up - 1 >= wants.needed):
                steps.drain.append(one.name)
                n_up -= one.is_up
    return steps


def _batch(n: int) -> int:
    """How many of n are replaced at a time."""
    return max(1, math.ceil(_BATCH * n))


def _by_group(placed: list[Placed]) -> Mapping[tuple[str, str], list[Placed]]:
    found: dict[tuple[str, str], list[Placed]] = {}
    for one in placed:
        found.setdefault((one.group, one.zone), []).append(one)
    return found


def _leaving(here: list[Placed], want: Wanted | None) -> list[Placed]:
    """Those that are to go, in this order: first what does not serve anyway."""
    if want is None:
        leaving = list(here)
    else:
        new = [one for one in here if one.generation == want.generation and not one.drains]
        kept = sorted(new, key=lambda one: not one.is_up)[: want.total]
        leaving = [one for one in here if one not in kept]
    return sorted((one for one in leaving if not one.drains), key=lambda one: one.is_up)
