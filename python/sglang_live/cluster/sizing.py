"""How many hosts of the groups with `scaling` the calls need, by the rule of capacity/scaling.py.

In: what gateways report in the store of their shared limits, the hosts. Out: numbers by group and
zone. They fall only after all gateways have reported for as long as the rule looks back: an earlier
manager, or what is not known, may have needed more.
Owner: one Sizing per cluster.toml. Imported with such groups alone.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

import msgspec
from valkey.exceptions import ValkeyError

from sglang_live.capacity.scaling import FleetNow, Host, PoolPlan, Scaling, ScalingConfig
from sglang_live.cluster.spec import ClusterSpec, store_of
from sglang_live.gateway.shared_limits import GatewayReport, read_reports, slowest
from sglang_live.journal.valkey import connect

log = logging.getLogger(__name__)

Sizes = dict[str, dict[str, int]]
_PATIENCE_S = 2.0


class Sizing:
    """groups: names of those whose numbers follow the calls."""

    def __init__(self, spec: ClusterSpec, now_s: float):
        pools = {
            group.name: PoolPlan(
                stages=tuple(group.stages),
                sessions=group.scaling.sessions,
                cold_start_s=group.scaling.cold_start_s,
            )
            for group in spec.hosts
            if group.scaling is not None
        }
        # Spare hosts are of each group, and come on top.
        self._config = ScalingConfig(pools=pools, spare=0)
        self._scaling = Scaling(self._config)
        self.groups = pools.keys()
        self._client = connect(store_of(spec))
        self._served_s = dict.fromkeys(spec.zones or [""], now_s)  # when the zone had a host
        self._complete_from_s = math.inf
        self._error = ""

    async def sizes(
        self, now_s: float, before: Sizes, hosts: Sequence[Host], n_gateways: int
    ) -> Sizes:
        """What is to be, after what was. hosts: those of these groups. n_gateways: that serve.

        Without any report it is what was, as in zones that have lost all hosts.
        """
        lost = self._lost_zones(now_s, hosts)
        zones = tuple(zone for zone in self._served_s if zone not in lost)
        reports = await self._reports()
        if not reports or len(reports) < n_gateways:
            self._complete_from_s = math.inf
        else:
            self._complete_from_s = min(self._complete_from_s, now_s)
        if not reports or not zones:
            return before
        fleet = FleetNow(
            gateways=[one.load for one in reports],
            stages=slowest(reports),
            hosts=hosts,
            zones=zones,
            lost=lost,
        )
        wished = self._scaling.wish(now_s, fleet).hosts
        falls = now_s - self._complete_from_s >= self._config.shrinks_s
        return {
            name: _after(before.get(name, {}), of_zone, falls) for name, of_zone in wished.items()
        }

    async def close(self) -> None:
        await self._client.aclose()

    def _lost_zones(self, now_s: float, hosts: Sequence[Host]) -> tuple[str, ...]:
        """Zones in which no host has served for as long as a new one needs. Of one zone: none."""
        up = {one.zone for one in hosts if one.state == "up"}
        self._served_s |= {zone: now_s for zone in self._served_s if zone in up}
        patience_s = max(plan.cold_start_s for plan in self._config.pools.values())
        lost = [zone for zone, at_s in self._served_s.items() if now_s - at_s > patience_s]
        return tuple(lost) if len(lost) < len(self._served_s) else ()

    async def _reports(self) -> list[GatewayReport]:
        error, found = "", []
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = await read_reports(self._client)
        except (ValkeyError, OSError, TimeoutError, msgspec.MsgspecError) as lost:
            error = f"{type(lost).__name__} {lost}"
        if error and not self._error:
            log.error("reports_unreadable error=%.200s: no group of hosts shrinks", error)
        self._error = error
        return found


def _after(before: Mapping[str, int], wished: Mapping[str, int], falls: bool) -> dict[str, int]:
    new = {zone: n if falls else max(n, before.get(zone, 0)) for zone, n in wished.items()}
    return {**before, **new}
