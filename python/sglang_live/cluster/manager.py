"""ClusterManager: has Ray place hosts and gateways, and knows where the stages are.

One detached actor, whose state is in Ray's GCS: hosts and gateways are detached too, so that none
ends with it, and the next one goes on with what it finds. It carries neither a frame nor a session.
What it wants of machines Ray's autoscaler sees: placement groups that wait for one, and machines
without any.
"""

import asyncio
import hashlib
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sglang_live import __version__
from sglang_live.aio import background, lasting
from sglang_live.capacity.scaling import Host
from sglang_live.clock import MonotonicClock
from sglang_live.cluster.gateway import GatewayHost
from sglang_live.cluster.host import StageHost
from sglang_live.cluster.hosted import GatewayOrder, HostNews, StagesOrder
from sglang_live.cluster.plan import Placed, Wanted, next_steps
from sglang_live.cluster.spec import GATEWAYS, NAMESPACE, ClusterSpec, HostGroup
from sglang_live.cluster.state import Record, State, Status, down
from sglang_live.orchestrator.directory import Table
from sglang_live.stages.transport.protocol import protocol_hash

if TYPE_CHECKING:
    from sglang_live.cluster.sizing import Sizing

log = logging.getLogger(__name__)

_STATE_KEY = b"sglang_live.cluster"
_STEP_S = 0.25
_LONG_POLL_S = 10.0
_ANSWER_S = 20.0
_RETRY_S = 0.5
# Gateways have read by then that a host drains, and begin no more turns on it; and it has told how
# many it has since then, which it asks its stages every two seconds.
_READ_BY_S = 6.0
_SIZE_EVERY_S = 5.0


class ClusterManager:
    """Coroutines of one event loop, as Ray runs an actor that has some."""

    async def __init__(self) -> None:  # type: ignore[misc]  # as Ray has it
        saved = internal_kv._internal_kv_get(_STATE_KEY, namespace=NAMESPACE)
        self._state = msgspec.json.decode(saved, type=State) if saved else State()
        self._saved = saved
        # Those that answer: after a start of this actor, none is known to.
        self._answers: set[str] = set()
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._table_changed = asyncio.Condition()
        self._table, self._version = b"", ""
        await self._publish()
        self._clock = MonotonicClock()
        self._began_s = self._clock.now_s()
        self._running = [
            asyncio.create_task(lasting(work, name, self._clock))
            for work, name in ((self._run, "cluster"), (self._size, "sizes"))
        ]

    # --- for gateways and launch_cluster ---

    async def table(self, known: str) -> tuple[str, bytes]:
        """The version of the table, and the table as JSON: soon, once it is another than the known
        one, or after a few seconds."""
        async with self._table_changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LONG_POLL_S):
                    await self._table_changed.wait_for(lambda: self._version != known)
            return self._version, self._table

    async def apply(self, spec: bytes) -> None:
        """From now on the cluster is to be like this ClusterSpec, as JSON."""
        self._state.spec = msgspec.json.decode(spec, type=ClusterSpec)
        self._save()

    async def drain(self, name: str) -> bool:
        """Take a host or gateway away; another one comes in its place. False: there is none."""
        if (record := self._state.records.get(name)) is None:
            return False
        self._begin_to_drain(record)
        self._save()
        return True

    async def stop(self) -> None:
        """End all hosts and gateways now."""
        self._state.spec = None
        for record in list(self._state.records.values()):
            self._remove(record)
        internal_kv._internal_kv_del(_STATE_KEY, namespace=NAMESPACE)

    async def status(self) -> bytes:
        """A list of Status as JSON."""
        found = []
        for record in self._state.records.values():
            state = "draining" if record.drains else "serving"
            if state == "serving" and not self._is_up(record):
                state = "down" if record.numbers or record.news.error else "starting"
            found.append(
                Status(
                    name=record.name,
                    state=state,
                    url=record.news.url,
                    replicas=record.rows(),
                    error=record.news.error,
                )
            )
        return msgspec.json.encode(found)

    async def version(self) -> str:
        return manager_version()

    # --- hosts ---

    async def _run(self) -> None:
        while True:
            for record in list(self._state.records.values()):
                if (task := self._followed.get(record.name)) is None or task.done():
                    following = background(self._follow(record), "host")
                    self._followed[record.name] = following
                if record.drains and self._is_empty(record):
                    self._remove(record)
            if (spec := self._state.spec) is not None and self._knows_all():
                self._step(spec)
            self._save()
            await self._publish()
            await asyncio.sleep(_STEP_S)

    def _knows_all(self) -> bool:
        """False after a start until each has had the time to answer: none counts as down then."""
        have_answered = self._state.records.keys() <= self._answers
        return have_answered or self._clock.now_s() - self._began_s >= _ANSWER_S

    def _step(self, spec: ClusterSpec) -> None:
        # The fullest first, so that those of which there are too many are the emptiest.
        records = sorted(
            self._state.records.values(), key=lambda one: (-one.n_sessions, -one.n_jobs)
        )
        placed = [
            Placed(
                name=record.name,
                group=record.group,
                zone=record.zone,
                generation=record.generation,
                protocol=record.news.protocol,
                is_up=self._is_up(record),
                drains=record.drains,
            )
            for record in records
        ]
        wanted = self._state.wanted()
        steps = next_steps(wanted, placed, gateways=GATEWAYS, protocol=protocol_hash())
        for want in steps.start:
            self._start(spec, want)
        for name in steps.drain:
            self._begin_to_drain(self._state.records[name])

    def _start(self, spec: ClusterSpec, want: Wanted) -> None:
        group = spec.group(want.group)
        assert group is not None
        # Never used again: Ray may still have the one of a host that has just ended.
        name = "-".join(filter(None, (want.group, want.zone, str(self._state.n_started))))
        self._state.n_started += 1
        self._state.records[name] = Record(
            name=name, group=want.group, zone=want.zone, generation=want.generation
        )
        # Before Ray has it: another manager could neither follow it nor use its name.
        self._save()
        bundle = {"CPU": group.cpus}
        order: msgspec.Struct = GatewayOrder(argv=spec.argv(group))
        host: type = GatewayHost
        if isinstance(group, HostGroup):
            if group.gpus:
                bundle["GPU"] = group.gpus
            order = StagesOrder(
                argv=spec.argv(group),
                stages=group.stages,
                address=spec.address,
                command=group.command,
            )
            host = StageHost
        place = placement_group(
            [bundle],
            name=name,
            lifetime="detached",
            bundle_label_selector=[{spec.zone_label: want.zone}] if want.zone else None,
        )
        ray.remote(host).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=8,
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(place, 0),
        ).remote(msgspec.json.encode(order))
        log.warning("host_started %s", name)

    def _begin_to_drain(self, record: Record) -> None:
        if not record.drains:
            record.drains_from_s = time.time()
            log.warning("host_drains %s", record.name)
            if (following := self._followed.pop(record.name, None)) is not None:
                following.cancel()  # it waits for news; the next one tells a gateway at once

    def _is_empty(self, record: Record) -> bool:
        """Whether nothing is lost if it ends now, or its time to drain is over."""
        assert record.drains_from_s is not None
        spec, since_s = self._state.spec, time.time() - record.drains_from_s
        has_begun = bool(record.news.protocol)
        if spec is None or since_s >= spec.drain_s or not has_begun:
            return True
        if record.group == GATEWAYS:
            return record.news.ended
        others = sum(
            self._is_up(other) and not other.drains
            for other in self._state.records.values()
            if (other.group, other.zone) == (record.group, record.zone)
        )
        is_free = record.name in self._answers and not record.n_jobs
        is_needed = others < self._state.needed(record.group, record.zone)
        return is_free and since_s >= _READ_BY_S and not is_needed

    def _remove(self, record: Record) -> None:
        with suppress(ValueError):  # it is gone
            ray.kill(ray.get_actor(record.name, namespace=NAMESPACE))
        with suppress(ValueError):
            remove_placement_group(get_placement_group(record.name))
        log.warning("host_ended %s", record.name)
        del self._state.records[record.name]
        self._answers.discard(record.name)
        if (following := self._followed.pop(record.name, None)) is not None:
            following.cancel()

    async def _follow(self, record: Record) -> None:
        """Learn what a host tells, as long as this task runs."""
        known = ""
        actor: Any = None
        while True:
            try:
                # Without the head it waits, and what is known is enough.
                actor = actor or await asyncio.to_thread(ray.get_actor, record.name, NAMESPACE)
                if record.group == GATEWAYS and record.drains:
                    actor.drain.remote()  # each time: it may have begun anew
                async with asyncio.timeout(_ANSWER_S):
                    known, news = await actor.facts.remote(known)
            except ValueError:  # Ray has given it up: another one is started
                self._remove(record)
                return
            except (RayError, TimeoutError) as error:
                actor = None
                if record.name in self._answers:
                    log.warning("host_silent %s error=%.200r", record.name, str(error))
                self._answers.discard(record.name)
                await asyncio.sleep(_RETRY_S)
                continue
            self._answers.add(record.name)
            self._learn(record, msgspec.json.decode(news, type=HostNews))

    def _learn(self, record: Record, news: HostNews) -> None:
        if not news.replicas and not news.url and not news.ended:
            # It starts again: where its stages were is what is known until they are elsewhere.
            kept = {"replicas": down(record.news), "protocol": record.news.protocol}
            news = msgspec.structs.replace(news, **kept)
        record.news = news
        for replica in news.replicas:
            key = f"{replica.stage}/{replica.number}"
            if replica.is_up and key not in record.numbers:
                record.numbers = record.numbers | {key: self._free_number(replica.stage)}

    def _free_number(self, stage: str) -> int:
        used = {
            number
            for record in self._state.records.values()
            for key, number in record.numbers.items()
            if key.startswith(f"{stage}/")
        }
        return next(n for n in range(len(used) + 1) if n not in used)

    def _is_up(self, record: Record) -> bool:
        return record.name in self._answers and record.news.is_up

    # --- how many ---

    async def _size(self) -> None:
        """Keep the numbers of hosts as the calls need them."""
        spec: ClusterSpec | None = None
        sizing: Sizing | None = None
        while True:
            await asyncio.sleep(_SIZE_EVERY_S)
            if spec is not self._state.spec:
                if sizing is not None:
                    await sizing.close()
                spec = self._state.spec
                sizing = None if spec is None else _sizing_of(spec, self._clock.now_s())
            if sizing is None:
                continue
            records = self._state.records.values()
            hosts = [self._host(one) for one in records if one.group in sizing.groups]
            n_gateways = sum(one.group == GATEWAYS and self._is_up(one) for one in records)
            before = self._state.sizes
            sizes = await sizing.sizes(self._clock.now_s(), before, hosts, n_gateways)
            if sizes != before and spec is self._state.spec:
                log.warning("hosts_needed %s", sizes)
                self._state.sizes = sizes

    def _host(self, record: Record) -> Host:
        state: Literal["starting", "up"] = "up" if self._is_up(record) else "starting"
        return Host(
            name=record.name,
            pool=record.group,
            zone=record.zone,
            n_open=record.n_sessions,
            state="draining" if record.drains else state,
        )

    # --- what others read ---

    async def _publish(self) -> None:
        rows = [row for record in self._state.records.values() for row in record.rows()]
        table = msgspec.json.encode(Table(tuple(rows)))
        if table != self._table:
            async with self._table_changed:
                self._table = table
                self._version = hashlib.blake2b(table, digest_size=8).hexdigest()
                self._table_changed.notify_all()

    def _save(self) -> None:
        if self._state.spec is not None and (state := self._state.encoded()) != self._saved:
            internal_kv._internal_kv_put(_STATE_KEY, state, overwrite=True, namespace=NAMESPACE)
            self._saved = state


def _sizing_of(spec: ClusterSpec, now_s: float) -> "Sizing | None":
    """None: all numbers are settled."""
    if not any(group.scaling for group in spec.hosts):
        return None
    from sglang_live.cluster.sizing import Sizing

    return Sizing(spec, now_s)


def manager_version() -> str:
    """Of this code: a manager of another one is replaced."""
    return f"{__version__} {protocol_hash()}"
