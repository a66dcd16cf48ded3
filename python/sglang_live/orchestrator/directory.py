"""Which replicas of the stages there are, and a supervisor that follows it.

In: a StageDirectory. On one machine it is what the flags say; in a cluster it is a file with the
table of all replicas, in which these appear, drain and vanish while calls go on. A table that can
no longer be read stays as it was.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sglang_live.aio import lasting
from sglang_live.clock import Clock
from sglang_live.errors import BadInputError
from sglang_live.stages.spec import STAGES, StageSpec
from sglang_live.stages.supervisor import Replica, Supervisor
from sglang_live.stages.transport.protocol import protocol_hash
from sglang_live.stages.transport.stage_key import check_exposed, host_and_port

log = logging.getLogger(__name__)

_READ_EVERY_S = 0.25
_START_CHECK_S = 0.1


class TableRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica on another host.

    replica: stage and number, as in "talker/3".
    address: tcp://HOST:PORT.
    protocol: of its messages (stages/transport/protocol.py).
    zone: part of the machines that may fail together. "": there are none.
    """

    replica: str
    address: str
    protocol: str
    zone: str = ""
    state: Literal["serving", "draining"] = "serving"

    def __post_init__(self) -> None:
        """Raises ValueError."""
        stage, _, number = self.replica.partition("/")
        if stage not in STAGES or not number.isdecimal():
            raise ValueError(f"{self.replica!r} is no replica, such as {STAGES[0]}/0")
        host_and_port("address", self.address)

    @property
    def stage(self) -> str:
        return self.replica.partition("/")[0]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replicas: tuple[TableRow, ...]

    def __post_init__(self) -> None:
        """Raises ValueError."""
        names = Counter(row.replica for row in self.replicas)
        if doubled := [name for name, n in names.items() if n > 1]:
            raise ValueError(f"{doubled[0]} is there twice")


class StageDirectory(Protocol):
    """
    Attributes:
        specs: of the replicas that are there from the start: the server serves once all do.
    """

    specs: list[StageSpec]

    def tables(self) -> AsyncGenerator[Table, None]:
        """Yield the table of further replicas, now and whenever it has changed."""
        ...

    def spec(self, row: TableRow) -> StageSpec:
        """How the server connects to a replica of a table."""
        ...

    @property
    def n_unreadable(self) -> int:
        """How often there was no table to be read."""
        ...


class StaticDirectory:
    """What the flags say, for the whole life of a server."""

    n_unreadable = 0

    def __init__(self, specs: list[StageSpec]):
        self.specs = specs

    async def tables(self) -> AsyncGenerator[Table, None]:
        return
        yield

    def spec(self, row: TableRow) -> StageSpec:
        raise AssertionError("there are no tables")


class FileDirectory:
    """A table in a file, which its writer replaces as a whole.

    Args:
        path: of the file, a Table as JSON. It need not exist yet.
        key_file, keyless: as --stage-key-file and --allow-keyless-stages.
        run_dir: of the server.
    """

    def __init__(self, path: Path, *, key_file: str, keyless: bool, run_dir: Path, clock: Clock):
        self.specs: list[StageSpec] = []
        self.n_unreadable = 0
        self._path, self._clock = path, clock
        self._key_file, self._keyless, self._run_dir = key_file, keyless, run_dir
        self._error = ""

    async def tables(self) -> AsyncGenerator[Table, None]:
        text, read = b"", None
        while True:
            try:
                if (text := self._path.read_bytes()) != read:
                    read = text
                    yield self._decoded(text)
                self._error = ""
            except (OSError, msgspec.MsgspecError, BadInputError) as error:
                self._note(str(error))
            await self._clock.sleep(_READ_EVERY_S)

    def _decoded(self, text: bytes) -> Table:
        table = msgspec.json.decode(text, type=Table)
        check_exposed(tuple(r.address for r in table.replicas), self._key_file, self._keyless)
        return table

    def _note(self, error: str) -> None:
        if error != self._error:
            self.n_unreadable += 1
            log.error("directory_unreadable path=%s: %s", self._path, error)
        self._error = error

    def spec(self, row: TableRow) -> StageSpec:
        return StageSpec(
            stage=row.stage,
            replica=int(row.replica.partition("/")[2]),
            model_path="",
            family="",
            cache_dir="",
            address=row.address,
            same_host=False,
            remote=True,
            key_file=self._key_file,
            run_dir=str(self._run_dir),
            served_name="",
        )


class FollowedStages:
    """The replicas of a directory, in a supervisor.

    Args:
        stages: of the model.
    """

    def __init__(
        self,
        directory: StageDirectory,
        supervisor: Supervisor,
        stages: Collection[str],
        clock: Clock,
    ):
        self.directory, self.supervisor = directory, supervisor
        self.stages, self._clock = stages, clock
        self._table = Table(())
        self._followed: dict[TableRow, Replica] = {}  # by row, as it was when it appeared
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when a replica of every stage serves, and all that were there from the start.

        Raises:
            StageUnavailableError: one of these ended before it was ready (its log says why).
        """
        await self.supervisor.start()
        self._following = asyncio.create_task(
            lasting(self._follow, "directory", self._clock), name="directory"
        )
        while missing := self.missing():
            log.info("stages_awaited %s", ",".join(missing))
            while self.missing() == missing:
                await self._clock.sleep(_START_CHECK_S)

    async def stop(self) -> None:
        """The replicas stay, for the supervisor to stop."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    def missing(self) -> list[str]:
        """Stages of which no replica serves."""
        up = {replica.spec.stage for replica in self.supervisor.replicas if replica.is_up}
        return [stage for stage in self.stages if stage not in up]

    async def _follow(self) -> None:
        async with aclosing(self.directory.tables()) as tables:
            async for table in tables:
                await self._apply(table)
        await asyncio.Event().wait()  # no other table will come

    async def _apply(self, table: Table) -> None:
        known = {row.replica: row.protocol for row in self._table.replicas}
        bound = {_same(row): row for row in table.replicas if row.protocol == protocol_hash()}
        for row in table.replicas:
            if row.protocol != protocol_hash() and known.get(row.replica) != row.protocol:
                log.error(
                    "stage_not_bound %s address=%s protocol=%s own=%s",
                    row.replica,
                    row.address,
                    row.protocol,
                    protocol_hash(),
                )
        self._table = table
        for key in self._followed.keys() - bound.keys():
            log.info("stage_left %s", key.replica)
            await self.supervisor.leave(self._followed.pop(key))
        for key, row in bound.items():
            if key not in self._followed:
                log.info("stage_followed %s address=%s", row.replica, row.address)
                self._followed[key] = self.supervisor.follow(self.directory.spec(row))
            replica, drains = self._followed[key], row.state == "draining"
            if replica.drains != drains:
                log.info("stage_drains %s %s", row.replica, drains)
                replica.drains = drains

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        listed = GaugeMetricFamily(
            "sglang_live_directory_replica",
            "1 for each replica of the cluster's table: serving, draining, or of another protocol.",
            labels=["replica", "zone", "state"],
        )
        for row in self._table.replicas:
            state = row.state if row.protocol == protocol_hash() else "other_protocol"
            listed.add_metric([row.replica, row.zone, state], 1.0)
        yield listed
        yield CounterMetricFamily(
            "sglang_live_directory_unreadable",
            "Times that the cluster's table could not be read, and stayed as it was.",
            value=self.directory.n_unreadable,
        )


def _same(row: TableRow) -> TableRow:
    """What stays as long as a row is about the same replica."""
    return msgspec.structs.replace(row, state="serving", zone="")
