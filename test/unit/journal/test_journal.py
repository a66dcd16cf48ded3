"""What of calls is written, and what becomes of them when it is not."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from sglang_live.clock import MonotonicClock, SimClock
from sglang_live.errors import BadInputError
from sglang_live.journal.journal import Journal, Lazy, open_store
from sglang_live.journal.records import FleetKey, UnreadableRecordError
from sglang_live.journal.sqlite import SqliteStore
from sglang_live.journal.store import Outcome, StoreError, Write

KEY = FleetKey(b"x" * 32)


class Faulty(SqliteStore):
    """A store in a file, which is away while is_away."""

    is_away = False
    may_write: asyncio.Event | None = None
    n_writes = 0

    async def write(self, writes, keep_s):
        self.n_writes += 1
        if self.may_write is not None:
            await self.may_write.wait()
        if self.is_away:
            raise StoreError("away")
        return await super().write(writes, keep_s)


@asynccontextmanager
async def journal_in(folder, **settings):
    store = Faulty(folder / "journal")
    journal = Journal(store, KEY, SimClock(), **{"keep_s": 60.0, "apart_s": 0.0} | settings)
    await journal.start()
    try:
        yield journal, store
    finally:
        await journal.close()


def begun(journal: Journal, session_id: str = "s", taken: list | None = None, epoch: int = 1):
    return journal.begin(
        session_id,
        epoch,
        lambda: taken.append(session_id) if taken is not None else None,
        lambda: None,
        is_first=epoch == 1,
    )


async def settled(*sessions) -> None:
    async with asyncio.timeout(20):
        for session in sessions:
            await session.settled()


async def records(journal: Journal, token: str = "t", session_id: str = "s") -> dict | None:
    found = await journal.find(session_id, token)
    return found and dict(found.records)


async def test_what_is_put_is_found_with_the_token_alone(tmp_path):
    async with journal_in(tmp_path) as (journal, _):
        session = begun(journal)
        session.put({"x": b"one", "y": b"two"}, "t")
        session.put({"x": b"three", "y": None})
        await settled(session)
        assert await records(journal) == {"x": b"three"}
        for token in ("", "u", "T"):
            assert await records(journal, token) is None
        session.put({"z": b"four"}, "u")
        await settled(session)
        assert await records(journal, "t") is None
        assert await records(journal, "u") == {"x": b"three", "z": b"four"}
        session.close()
    async with journal_in(tmp_path) as (journal, _):
        assert await records(journal, "u") is None


async def test_nothing_of_a_call_can_be_read_without_the_key(tmp_path):
    async with journal_in(tmp_path) as (journal, store):
        session = begun(journal)
        session.put({"x": b"what was said"}, "the token")
        await settled(session)
        kept = await store.read("s")
        files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert b"what was said" not in files and b"the token" not in files
        own = KEY.of_session("s")
        assert own.open("x", kept.records["x"]) == b"what was said"
        sealed = kept.records["x"]
        for key, name, data in (
            (FleetKey(b"y" * 32).of_session("s"), "x", sealed),
            (KEY.of_session("other"), "x", sealed),
            (own, "y", sealed),
            (own, "x", sealed[:-1]),
            (own, "x", sealed[:5]),
            (own, "x", bytes([sealed[0] ^ 1]) + sealed[1:]),
        ):
            with pytest.raises(UnreadableRecordError):
                key.open(name, data)
        assert own.seal("x", b"same") != own.seal("x", b"same")


async def test_a_heavy_record_is_made_in_a_thread(tmp_path):
    made: list[str] = []

    def make() -> bytes:
        made.append(threading.current_thread().name)
        return b"sound"

    async with journal_in(tmp_path) as (journal, _):
        session = begun(journal)
        session.put({"x": Lazy(make, 5)}, "t")
        assert not made
        await settled(session)
        assert await records(journal) == {"x": b"sound"}
        assert made and made[0] != threading.main_thread().name


async def test_while_the_store_is_slow_the_newest_is_kept_of_each_record(tmp_path):
    async with journal_in(tmp_path) as (journal, store):
        store.may_write = asyncio.Event()
        session = begun(journal)
        for n in range(100):
            session.put({"x": b"%d" % n, f"r{n}": b"y"}, "t")
            await asyncio.sleep(0)
        assert journal.pending_bytes < 100 + 4
        store.may_write.set()
        await settled(session)
        found = await records(journal)
        assert found["x"] == b"99" and len(found) == 101
        assert journal.pending_bytes == 0


async def test_what_a_store_did_not_take_is_written_when_it_is_back(tmp_path):
    async with journal_in(tmp_path) as (journal, store):
        session = begun(journal)
        store.is_away = True
        session.put({"x": b"1", "y": b"1"}, "t")
        async with asyncio.timeout(20):
            while not journal.counts.failures:
                await asyncio.sleep(0.01)
        session.put({"y": b"2"})
        store.is_away = False
        journal._clock.advance(5.0)
        await settled(session)
        assert await records(journal) == {"x": b"1", "y": b"2"}
        assert session.is_kept and journal.counts.failures == 1


async def test_a_call_that_exceeds_the_bound_is_dropped_and_no_other(tmp_path):
    async with journal_in(tmp_path, most_pending_bytes=1000) as (journal, store):
        small, large = begun(journal, "small"), begun(journal, "large")
        large.put({"x": b"1"}, "t")
        await settled(large)
        store.may_write = asyncio.Event()
        small.put({"x": b"1"}, "t")
        for n in range(11):
            large.put({f"r{n}": bytes(100)})
        assert not large.is_kept and small.is_kept
        assert journal.counts.dropped["full"] == 1
        large.put({"x": b"2"})
        assert journal.pending_bytes == 1
        store.may_write.set()
        await settled(small, large)
        async with asyncio.timeout(20):
            while await records(journal, session_id="large") is not None:
                await asyncio.sleep(0.01)
        assert await records(journal, session_id="small") == {"x": b"1"}


async def test_what_may_wait_is_one_write_of_all_sessions(tmp_path):
    async with journal_in(tmp_path) as (journal, store):
        sessions = [begun(journal, name) for name in "abc"]
        for session in sessions:
            session.put({"x": b"1"}, "t")
        await settled(*sessions)
        writes = store.n_writes
        for session in sessions:
            session.on_due = lambda session=session: session.put({"x": b"2"})
            session.put_later()
        sessions[2].put({"x": b"1.5"})  # what waits is newer than that
        sessions[2].put_later()
        await settled(*sessions)
        assert store.n_writes == writes + 1
        sessions[1].close()
        journal._clock.advance(0.5)
        async with asyncio.timeout(20):
            while (await records(journal, session_id="a")) != {"x": b"2"}:
                await asyncio.sleep(0.01)
        assert await records(journal, session_id="b") is None
        assert await records(journal, session_id="c") == {"x": b"2"}
        assert store.n_writes == writes + 2


async def test_the_more_calls_there_are_the_more_of_them_share_a_write(tmp_path):
    async with journal_in(tmp_path, apart_s=0.1) as (journal, store):
        sessions = [begun(journal, name) for name in "abc"]
        sessions[0].put({"x": b"1"}, "t")
        await settled(sessions[0])
        for session in sessions:
            session.put({"x": b"2"}, "t")
        journal._clock.advance(0.2)
        await asyncio.sleep(0.05)
        assert store.n_writes == 1 and await records(journal, session_id="a") == {"x": b"1"}
        journal._clock.advance(0.1)
        await settled(*sessions)
        assert store.n_writes == 2
        assert [await records(journal, session_id=name) for name in "abc"] == [{"x": b"2"}] * 3


async def test_a_silent_owner_learns_that_its_call_has_gone_on_elsewhere(tmp_path):
    taken: list[str] = []
    async with journal_in(tmp_path) as (one, _), journal_in(tmp_path) as (two, _):
        session = begun(one, taken=taken)
        session.put({"x": b"1"}, "t")
        await settled(session)
        assert await two.take(await two.find("s", "t"))
        async with asyncio.timeout(20):
            while not taken:
                one._clock.advance(0.5)
                await asyncio.sleep(0.01)
        assert one._clock.now_s() >= 3.0


async def test_the_owner_learns_that_its_call_has_gone_on_elsewhere(tmp_path):
    taken: list[str] = []
    async with journal_in(tmp_path) as (one, _), journal_in(tmp_path) as (two, _):
        session = begun(one, taken=taken)
        session.put({"x": b"1"}, "t")
        await settled(session)
        found = await two.find("s", "t")
        assert await two.take(found) and not await two.take(found)
        assert not taken
        session.put({})
        await settled(session)
        assert taken == ["s"] and session.is_taken and one.counts.taken == 1
        session.close()
        after = begun(two, epoch=2)
        after.put({"x": b"2"}, "u")
        await settled(after)
        assert await records(one, "u") == {"x": b"2"}


async def test_a_call_that_the_store_has_lost_goes_on_and_is_counted(tmp_path):
    taken: list[str] = []
    async with journal_in(tmp_path) as (journal, store):
        session = begun(journal, taken=taken)
        session.put({"x": b"1"}, "t")
        await settled(session)
        await store.delete("s", 1)
        session.put({"x": b"2"})
        await settled(session)
        assert not taken and not session.is_kept and not session.is_taken
        assert journal.counts.dropped["gone"] == 1


async def test_what_waits_is_written_when_the_gateway_stops(tmp_path):
    async with journal_in(tmp_path) as (journal, _):
        begun(journal, "a").put({"x": b"1"}, "t")
        begun(journal, "b").put({"x": b"1"}, "t")
        over = begun(journal, "c")
        over.put({"x": b"1"}, "t")
        over.close()
    async with journal_in(tmp_path) as (journal, _):
        found = [await records(journal, session_id=one) for one in "abc"]
        assert found == [{"x": b"1"}, {"x": b"1"}, None]


async def test_a_gateway_does_not_start_without_its_store(tmp_path):
    journal = Journal(
        open_store(f"sqlite:{tmp_path}/absent/journal"), KEY, MonotonicClock(), keep_s=1.0
    )
    with pytest.raises(BadInputError, match="--journal"):
        await journal.start()
    await journal.close()


async def test_a_write_is_refused_as_a_whole(tmp_path):
    store = SqliteStore(tmp_path / "journal")
    await store.open()
    writes = [Write("a", 1, {"x": b"1"}, is_first=True), Write("b", 1, {"x": b"1"})]
    assert await store.write(writes, 60.0) == [Outcome.WRITTEN, Outcome.GONE]
    assert await store.read("b") is None
    await store.close()


def test_a_key_file_is_secret_and_long(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"x" * 32 + b"\n")
    path.chmod(0o640)
    with pytest.raises(BadInputError, match="chmod 600"):
        FleetKey.load(path)
    path.chmod(0o600)
    loaded = FleetKey.load(path)
    assert loaded.derived("a") == KEY.derived("a") != KEY.derived("b")
    path.write_bytes(b"x" * 31)
    with pytest.raises(BadInputError, match="32 bytes"):
        FleetKey.load(path)
