"""What the manager knows and keeps: the hosts and gateways that were started, and how many of each
there are to be."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from sglang_live.cluster.hosted import HostNews, ReplicaNews
from sglang_live.cluster.plan import Wanted
from sglang_live.cluster.spec import GATEWAYS, ClusterSpec, HostGroup
from sglang_live.orchestrator.directory import TableRow


class Record(msgspec.Struct, kw_only=True):
    """A host or gateway that was started.

    drains_from_s: Unix time. None: it does not drain.
    numbers: in the cluster, of its replicas, by stage and number on the host.
    news: its latest.
    """

    name: str
    group: str
    zone: str
    generation: str
    drains_from_s: float | None = None
    numbers: dict[str, int] = {}
    news: HostNews = HostNews()

    @property
    def drains(self) -> bool:
        return self.drains_from_s is not None

    @property
    def n_sessions(self) -> int:
        return max((replica.n_sessions for replica in self.news.replicas), default=0)

    @property
    def n_jobs(self) -> int:
        return sum(replica.n_jobs for replica in self.news.replicas)

    def rows(self) -> list[TableRow]:
        """Of the replicas that have been up."""
        state: Literal["serving", "draining"] = "draining" if self.drains else "serving"
        return [
            TableRow(
                replica=f"{one.stage}/{number}",
                address=one.address,
                protocol=self.news.protocol,
                zone=self.zone,
                state=state,
            )
            for one in self.news.replicas
            if (number := self.numbers.get(f"{one.stage}/{one.number}")) is not None
        ]


class State(msgspec.Struct):
    """
    spec: None: there is to be nothing.
    n_started: hosts and gateways so far, for new names.
    sizes: by group and zone, as the calls need them; see Sizing.
    """

    spec: ClusterSpec | None = None
    records: dict[str, Record] = {}
    n_started: int = 0
    sizes: dict[str, dict[str, int]] = {}

    def needed(self, name: str, zone: str) -> int:
        """How many of a group are to serve in a zone at any time. 0: there is no such group."""
        group = None if self.spec is None else self.spec.group(name)
        if isinstance(group, HostGroup):
            return group.needed(self.sizes.get(name, {}).get(zone, 0))
        return 0 if group is None else group.count

    def wanted(self) -> Iterator[Wanted]:
        spec = self.spec
        assert spec is not None
        groups = [(group, zone) for group in spec.hosts for zone in spec.zones or [""]]
        for group, zone in groups:
            yield self._wanted(spec, group.name, zone, group.spare)
        yield self._wanted(spec, GATEWAYS, "", spec.gateways.spare)

    def _wanted(self, spec: ClusterSpec, name: str, zone: str, spare: int) -> Wanted:
        return Wanted(
            group=name,
            zone=zone,
            needed=self.needed(name, zone),
            total=self.needed(name, zone) + spare,
            generation=spec.generation(name),
        )

    def encoded(self) -> bytes:
        """As JSON, without what changes from moment to moment."""
        records = {
            name: msgspec.structs.replace(
                record, news=msgspec.structs.replace(record.news, replicas=down(record.news))
            )
            for name, record in self.records.items()
        }
        return msgspec.json.encode(msgspec.structs.replace(self, records=records))


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Of one host or gateway. state: "starting", "serving", "down" or "draining"."""

    name: str
    state: str
    url: str
    replicas: list[TableRow]
    error: str


def down(news: HostNews) -> tuple[ReplicaNews, ...]:
    """Its replicas, as long as they do not answer."""
    nothing = {"is_up": False, "n_sessions": 0, "n_jobs": 0}
    return tuple(msgspec.structs.replace(one, **nothing) for one in news.replicas)
