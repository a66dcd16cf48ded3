"""The journal of a gateway: its calls, written behind their turns, for another gateway.

In: records of calls, as they change. Out: the same, sealed, in a store; and the calls of others.
Owner: one Journal per process. put() neither waits nor fails. What is not written yet is replaced
by what comes later under the same name, so that a slow store gets the newest only; beyond a bound
a call is dropped from the journal. It goes on, and cannot be resumed elsewhere: a record without
some of its changes would be wrong. What may wait is asked for at a tick, of all calls at once.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from secrets import compare_digest

from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.aio import background, end, lasting
from sglang_live.clock import Clock
from sglang_live.errors import BadInputError
from sglang_live.journal.records import FleetKey, SessionKey
from sglang_live.journal.store import Kept, Outcome, Store, StoreError, Write

log = logging.getLogger(__name__)

# Of all calls together, while the store is away: an hour of speech is 50 MB.
_MOST_PENDING_BYTES = 128 << 20
_RETRY_S = 1.0
# The end of a call is written before its process ends, if the store answers in this time.
_CLOSE_S = 2.0
# Between two writes, for each call: more calls share a write, which costs as much as ten of them.
_APART_S = 0.0002
# What may wait waits so long at most.
_TICK_S = 0.5
# By then an owner whose call has gone on elsewhere learns of it: 3 s.
_STILL_HERE_TICKS = 6
_SQLITE = "sqlite:"


@dataclass(frozen=True, slots=True)
class Lazy:
    """A record that is made when it is written, in a thread. n_bytes: about its size."""

    make: Callable[[], bytes]
    n_bytes: int


Record = bytes | Lazy | None


def open_store(url: str) -> Store:
    """
    Args:
        url: sqlite:FILE, or that of a Valkey server.
    Raises:
        BadInputError: it is none of these.
    """
    if url.startswith(_SQLITE):
        from sglang_live.journal.sqlite import SqliteStore

        return SqliteStore(Path(url.removeprefix(_SQLITE)))
    from sglang_live.journal.valkey import ValkeyStore

    return ValkeyStore(url)


@dataclass(slots=True)
class Counts:
    """
    written, written_bytes: records, sealed.
    dropped: calls that were dropped from the journal: "full", "gone" from the store, or "failed".
    taken: calls that went on at another gateway.
    failures: of the store.
    """

    written: int = 0
    written_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {"full": 0, "gone": 0, "failed": 0})
    taken: int = 0
    failures: int = 0


@dataclass(eq=False)
class JournaledSession:
    """One call, for its owner.

    Args:
        on_taken: called when the call has gone on at another gateway: it has to end here.
        on_due: called when it is time to put what has changed.
    Attributes:
        is_kept: whether the journal has it. is_taken: another gateway has it.
        written: set when nothing is pending.
    """

    journal: "Journal"
    session_id: str
    epoch: int
    on_taken: Callable[[], None]
    on_due: Callable[[], None]
    is_first: bool
    key: SessionKey
    is_kept: bool = True
    is_taken: bool = False
    token: str = ""
    pending: dict[str, Record] = field(default_factory=dict)
    n_bytes: int = 0
    written: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, records: Mapping[str, Record], token: str = "") -> None:
        """Write these soon; none: the call is still here.

        Args:
            records: None: deleted.
            token: by which the call can be resumed from now on; "": as before.
        """
        if not self.is_kept:
            return
        self._merge({**self.pending, **records})
        if token:
            self.token = self.journal.key.digest("token", token)
        self.written.clear()
        self.journal.changed(self)

    def put_later(self) -> None:
        """Something has changed: on_due is called soon, at the same time as other sessions'."""
        self.journal.due_later(self)

    def not_written(self, write: Write, records: Mapping[str, Record]) -> None:
        """A write has failed: what has come since is newer."""
        self.token = self.token or write.token
        self._merge({**records, **self.pending})

    def take(self) -> tuple[dict[str, Record], str]:
        """All that is to be written now."""
        records, token = self.pending, self.token
        self._merge({})
        self.token = ""
        return records, token

    async def settled(self) -> None:
        """Wait until all is written, or the call is not kept any more."""
        if self.is_kept:
            await self.written.wait()

    def fail(self) -> None:
        """What was put may be incomplete."""
        self.journal.drop(self, "failed")

    def let_go(self) -> bool:
        """The call is over here. Returns whether another gateway can have it: all is written."""
        can = self.is_taken or (self.is_kept and self.written.is_set())
        if can:
            self.end()
        return can

    def close(self) -> None:
        """The call is over, here and everywhere."""
        if self.is_kept:
            self.end()
            self.journal.deleted(self)

    def end(self) -> None:
        self.is_kept = False
        self.journal.forget(self)
        self._merge({})
        self.written.set()

    def _merge(self, pending: dict[str, Record]) -> None:
        self.pending = pending
        n_bytes = sum(map(_size, pending.values()))
        self.journal.pending_bytes += n_bytes - self.n_bytes
        self.n_bytes = n_bytes


def _size(record: Record) -> int:
    return record.n_bytes if isinstance(record, Lazy) else len(record or b"")


class Journal:
    """
    Attributes:
        pending_bytes: not yet written, of all calls.
    """

    def __init__(
        self,
        store: Store,
        key: FleetKey,
        clock: Clock,
        *,
        keep_s: float,
        most_pending_bytes: int = _MOST_PENDING_BYTES,
        apart_s: float = _APART_S,
    ):
        """
        Args:
            keep_s: until a call expires to which nothing was written.
            apart_s: between two writes, for each open call.
        """
        self.key = key
        self.counts = Counts()
        self.pending_bytes = 0
        self._most_pending_bytes = most_pending_bytes
        self._store = store
        self._clock = clock
        self._keep_s = keep_s
        self._apart_s = apart_s
        self._changed: dict[str, JournaledSession] = {}
        self._deleted: list[JournaledSession] = []
        # Open ones with the ticks at which something was put last, oldest first; those with more.
        self._open: dict[JournaledSession, int] = {}
        self._due: dict[JournaledSession, None] = {}
        self._n_ticks = 0
        self._ticking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises BadInputError: the store cannot be opened."""
        try:
            await self._store.open()
        except StoreError as error:
            raise BadInputError(f"--journal: {error}") from error
        self._writing = background(lasting(self._write_on, "journal", self._clock), "journal")
        self._ticking = background(lasting(self._tick_on, "journal", self._clock), "journal")

    async def close(self) -> None:
        """Write what is left, if that takes no longer than moments."""
        for task in (self._ticking, self._writing):
            if task is not None:
                await end(task)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._write_all()
        except (StoreError, TimeoutError) as error:
            self.counts.failures += 1
            log.warning("journal_not_completed error=%r", error)
        await self._store.close()

    def begin(
        self,
        session_id: str,
        epoch: int,
        on_taken: Callable[[], None],
        on_due: Callable[[], None],
        *,
        is_first: bool,
    ) -> JournaledSession:
        """is_first: no gateway has had the call before. Others: see JournaledSession."""
        key = self.key.of_session(session_id)
        session = JournaledSession(self, session_id, epoch, on_taken, on_due, is_first, key)
        self._open[session] = self._n_ticks
        return session

    async def find(self, session_id: str, token: str) -> Kept | None:
        """A call of any gateway, with its records opened; None: there is none with this token.

        Raises StoreError, UnreadableRecordError.
        """
        kept = await self._store.read(session_id)
        if kept is None or not compare_digest(kept.token, self.key.digest("token", token)):
            return None
        key = self.key.of_session(session_id)
        records = {name: key.open(name, sealed) for name, sealed in kept.records.items()}
        return replace(kept, records=records)

    async def take(self, found: Kept) -> bool:
        """Make the call this gateway's, in the next epoch. Returns False if another was faster, or
        its owner has changed its token.

        Raises StoreError.
        """
        return await self._store.take(found.session_id, found.epoch, found.token)

    def changed(self, session: JournaledSession) -> None:
        self._changed[session.session_id] = session
        self.forget(session)
        self._open[session] = self._n_ticks
        if self.pending_bytes > self._most_pending_bytes:
            self.drop(session, "full")
        self._wake.set()

    def due_later(self, session: JournaledSession) -> None:
        self._due[session] = None

    def forget(self, session: JournaledSession) -> None:
        self._open.pop(session, None)
        self._due.pop(session, None)

    def deleted(self, session: JournaledSession) -> None:
        self._changed.pop(session.session_id, None)
        self._deleted.append(session)
        self._wake.set()

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        counts, name = self.counts, "sglang_live_journal_"
        for what, n, doc in (
            ("records", counts.written, "Records of calls that were written."),
            ("bytes", counts.written_bytes, "Of these records."),
            ("taken", counts.taken, "Calls that went on at another gateway."),
            ("failures", counts.failures, "Writes that the store has not taken."),
        ):
            yield CounterMetricFamily(name + what, doc, value=n)
        dropped = CounterMetricFamily(
            name + "dropped", "Calls that cannot be resumed elsewhere any more.", labels=["reason"]
        )
        for reason, n in counts.dropped.items():
            dropped.add_metric([reason], n)
        yield dropped

    async def _tick_on(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            self._tick()

    def _tick(self) -> None:
        self._n_ticks += 1
        until = self._n_ticks - _STILL_HERE_TICKS
        silent = dict.fromkeys(takewhile(lambda one: self._open[one] <= until, self._open))
        due, self._due = self._due, {}
        for session in due | silent:
            session.on_due()
        for session in silent:
            if self._open.get(session, self._n_ticks) <= until:
                self.changed(session)

    async def _write_on(self) -> None:
        while True:
            await self._wake.wait()
            try:
                await self._write_all()
                await self._clock.sleep(self._apart_s * len(self._open))
            except StoreError as error:
                self.counts.failures += 1
                log.warning("journal_write_failed error=%s", error)
                await self._clock.sleep(_RETRY_S)
                self._wake.set()

    async def _write_all(self) -> None:
        self._wake.clear()
        sessions, self._changed = list(self._changed.values()), {}
        taken = [session.take() for session in sessions]
        try:
            writes = await _sealed(sessions, taken)
            outcomes = await self._store.write(writes, self._keep_s) if writes else []
        except BaseException:
            for session, (records, token) in zip(sessions, taken, strict=True):
                if session.is_kept:
                    session.not_written(
                        Write(session.session_id, session.epoch, token=token), records
                    )
                    self._changed.setdefault(session.session_id, session)
            raise
        for session, write, outcome in zip(sessions, writes, outcomes, strict=True):
            self._note(session, write, outcome)
        while self._deleted:
            session = self._deleted[0]
            await self._store.delete(session.session_id, session.epoch)
            self._deleted.pop(0)

    def _note(self, session: JournaledSession, write: Write, outcome: Outcome) -> None:
        if outcome is Outcome.WRITTEN:
            session.is_first = False
            self.counts.written += len(write.records)
            self.counts.written_bytes += sum(len(data or b"") for data in write.records.values())
            if session.session_id not in self._changed:
                session.written.set()
        elif outcome is Outcome.TAKEN and session.is_kept:
            self.counts.taken += 1
            log.warning("session_taken session=%s epoch=%d", session.session_id, session.epoch)
            session.is_taken = True
            session.end()
            session.on_taken()
        elif session.is_kept:
            self.drop(session, "gone")

    def drop(self, session: JournaledSession, reason: str) -> None:
        """The call goes on, and no other gateway can."""
        self.counts.dropped[reason] += 1
        log.error("session_not_journaled session=%s reason=%s", session.session_id, reason)
        session.end()
        self.deleted(session)


async def _sealed(
    sessions: list[JournaledSession], taken: list[tuple[dict[str, Record], str]]
) -> list[Write]:
    def seal() -> list[Write]:
        return [
            Write(
                session.session_id,
                session.epoch,
                {
                    name: None if record is None else session.key.seal(name, _made(record))
                    for name, record in records.items()
                },
                token,
                session.is_first,
            )
            for session, (records, token) in zip(sessions, taken, strict=True)
        ]

    is_heavy = any(isinstance(one, Lazy) for records, _ in taken for one in records.values())
    return await asyncio.to_thread(seal) if is_heavy else seal()


def _made(record: bytes | Lazy) -> bytes:
    return record.make() if isinstance(record, Lazy) else record
