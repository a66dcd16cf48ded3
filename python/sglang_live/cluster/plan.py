"""What a cluster has to do next, to have what it is to have. Pure.

New ones come first: one that is to go drains when there are enough without it, one at a time. Old
gateways are bound to stages of their own protocol, which therefore stay as long as they do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


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
    complete = True
    for key, want in groups.items():
        here = [one for one in placed if (one.group, one.zone) == key and not one.drains]
        new = [one for one in here if one.generation == want.generation]
        complete &= sum(one.is_up for one in new) >= want.needed
        steps.start += [want] * (want.total - len(new))
    for key, here in _by_group(placed).items():
        wants = groups.get(key)
        leaving = _leaving(here, wants)
        n_up = sum(one.is_up and not one.drains for one in here)
        if any(one.drains for one in here) or not leaving:
            continue
        first = leaving[0]
        is_bound = key[0] != gateways and first.protocol not in ("", protocol)
        if is_bound and first.protocol in bound:
            continue
        if not first.is_up or (complete if wants is None else n_up - 1 >= wants.needed):
            steps.drain.append(first.name)
    return steps


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
