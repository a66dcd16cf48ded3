"""Claims about the broker, with real processes' file descriptors over real sockets."""

import asyncio
import os
import socket
import time
from contextlib import suppress

import pytest

from sglang_live.extensions.lending.broker import LeaseBroker
from sglang_live.extensions.lending.channel import BORROW, LEND, Bell, BrokerLink, close_all

pytestmark = pytest.mark.asyncio


class Engine:
    """This process, as one engine; `met`: by name, the partners that the broker introduced."""

    def __init__(self, path, role: str, name: str, pid: int | None = None, rank=0, n_ranks=1):
        self.role, self.name, self.pid = role, name, pid or os.getpid()
        self.rank, self.n_ranks, self.offsets = rank, n_ranks, [0, 4096]
        self.kind = "cpu"
        self.met: dict[str, list[int]] = {}
        self.files = [os.memfd_create(f"{name}-{n}") for n in range(2)] if role == LEND else []
        self.bell = Bell()
        self.link = BrokerLink(str(path), self._introduction)

    def _introduction(self):
        message = {
            "role": self.role,
            "name": self.name,
            "rank": self.rank,
            "n_ranks": self.n_ranks,
            "pid": self.pid,
            "partners": [self.pid] if self.met else [],
            "kind": self.kind,
            "offsets": self.offsets,
        }
        return message, (*self.files, self.bell.fd)

    async def until(self, wanted) -> None:
        async with asyncio.timeout(10):
            while not wanted():
                for message, fds in self.link.receive(time.monotonic()):
                    close_all(self.met.pop(message["meets"], []))
                    self.met[message["meets"]] = fds
                    self.last = message
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.link.close()
        self.bell.close()
        close_all([*self.files, *(fd for fds in self.met.values() for fd in fds)])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "leases"


@pytest.fixture
def broker(path):
    return LeaseBroker()


@pytest.fixture(autouse=True)
def no_file_is_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = set(os.listdir("/proc/self/fd")) - before
    names = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in left if _exists(fd)}
    assert not [name for name in names.values() if "memfd" in name or "pidfd" in name], names


def _exists(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


async def test_lender_and_borrower_get_each_others_files(path, broker):
    broker.start(path)
    lender, borrower = Engine(path, LEND, "lender"), Engine(path, BORROW, "borrower")
    await borrower.until(lambda: borrower.link._channel is not None)
    await lender.until(lambda: lender.met)
    await borrower.until(lambda: borrower.met)
    assert borrower.last["offsets"] == [0, 4096] and borrower.last["pid"] == os.getpid()
    memory, table, bell, pidfd = borrower.met["lender"]
    os.write(memory, b"kv")
    assert os.pread(lender.files[0], 2, 0) == b"kv"
    assert os.fstat(table).st_ino == os.fstat(lender.files[1]).st_ino
    os.eventfd_write(bell, 1)
    assert os.eventfd_read(lender.bell.fd) == 1
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        assert f"Pid:\t{os.getpid()}\n" in info.read()
    table_of_lender, bell_of_borrower, _ = lender.met["borrower"]
    assert os.fstat(table_of_lender).st_ino == os.fstat(table).st_ino
    os.eventfd_write(bell_of_borrower, 1)
    assert os.eventfd_read(borrower.bell.fd) == 1
    lender.close()
    borrower.close()
    broker.stop()


async def test_a_broker_that_is_started_again_does_not_introduce_a_pair_twice(path, broker):
    broker.start(path)
    lender, borrower = Engine(path, LEND, "lender"), Engine(path, BORROW, "borrower")
    await lender.until(lambda: lender.link._channel is not None)
    await borrower.until(lambda: borrower.met)
    await lender.until(lambda: lender.met)
    broker.stop()
    again = LeaseBroker()
    again.start(path)
    for engine in (lender, borrower):
        await engine.until(lambda e=engine: e.link._channel is None or len(again._engines) == 2)
    async with asyncio.timeout(10):
        while len([e for e in again._engines if e.message]) < 2:
            for engine in (lender, borrower):
                assert engine.link.receive(time.monotonic()) == []
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert again.counts["introduced"] == 0
    close_all(lender.met.pop("borrower"))  # it has ended
    lender.link.introduce()
    await lender.until(lambda: lender.met)
    assert again.counts["introduced"] == 1
    lender.close()
    await borrower.until(lambda: borrower.link._channel is None or again.counts["introduced"])
    for _, fds in borrower.link.receive(time.monotonic()):
        close_all(fds)
    borrower.close()
    again.stop()


async def test_lenders_are_shared_out_among_borrowers(path, broker):
    broker.start(path)
    borrowers = [Engine(path, BORROW, f"borrower-{n}") for n in range(2)]
    for borrower in borrowers:
        await borrower.until(lambda one=borrower: one.link._channel is not None)
    lenders = [Engine(path, LEND, f"lender-{n}") for n in range(4)]
    for lender in lenders:
        await lender.until(lambda one=lender: one.met)
    for borrower in borrowers:
        await borrower.until(lambda one=borrower: len(one.met) == 2)
    for engine in (*borrowers, *lenders):
        engine.close()
    broker.stop()


def ranks_of(path, role: str, name: str, n_ranks: int) -> list[Engine]:
    return [Engine(path, role, name, rank=rank, n_ranks=n_ranks) for rank in range(n_ranks)]


async def test_engines_are_introduced_rank_by_rank_when_all_ranks_are_there(path, broker):
    broker.start(path)
    lenders, borrowers = (ranks_of(path, role, role, 2) for role in (LEND, BORROW))
    for engine in (lenders[1], borrowers[1], lenders[0]):
        await engine.until(lambda one=engine: one.link._channel is not None)
    await asyncio.sleep(0.1)
    assert broker.counts["introduced"] == 0
    await borrowers[0].until(lambda: borrowers[0].met)
    for engine in (*lenders, borrowers[1]):
        await engine.until(lambda one=engine: one.met)
    assert broker.counts["introduced"] == 1
    assert borrowers[0].last["pair"] == borrowers[1].last["pair"]
    table_of_rank_0 = os.fstat(lenders[0].files[1]).st_ino
    for lender, borrower in zip(lenders, borrowers, strict=True):
        memory, table, bell, _ = borrower.met[LEND]
        assert os.fstat(memory).st_ino == os.fstat(lender.files[0]).st_ino
        assert os.fstat(table).st_ino == table_of_rank_0
        os.eventfd_write(bell, 1)
        assert os.eventfd_read(lenders[0].bell.fd) == 1
        table, bell, _ = lender.met[BORROW]
        assert os.fstat(table).st_ino == table_of_rank_0
        os.eventfd_write(bell, 1)
        assert os.eventfd_read(borrowers[0].bell.fd) == 1
    for engine in (*lenders, *borrowers):
        engine.close()
    broker.stop()


async def test_a_lender_with_another_number_of_ranks_is_refused(path, broker):
    broker.start(path)
    borrowers = ranks_of(path, BORROW, "borrower", 2)
    for engine in borrowers:
        await engine.until(lambda one=engine: one.link._channel is not None)
    lender = Engine(path, LEND, "lender")
    await lender.until(lambda: lender.link.refused)
    assert lender.link.refused == "ranks: 1 of the lender, 2 of the borrower"
    assert broker.counts["refused_ranks"] == 1 and not broker.counts["introduced"]
    for engine in (lender, *borrowers):
        engine.close()
    broker.stop()


async def test_memory_of_another_kind_of_device_is_refused(path, broker):
    broker.start(path)
    borrower, lender = Engine(path, BORROW, "borrower"), Engine(path, LEND, "lender")
    borrower.kind = "cuda"
    await borrower.until(lambda: borrower.link._channel is not None)
    await lender.until(lambda: lender.link.refused)
    assert lender.link.refused == "memory: cpu of the lender, cuda of the borrower"
    assert broker.counts["refused_memory"] == 1 and not broker.counts["introduced"]
    for engine in (lender, borrower):
        engine.close()
    broker.stop()


async def test_ranks_of_a_lender_with_different_memories_are_refused(path, broker):
    """Their slots would have different numbers."""
    broker.start(path)
    engines = [*ranks_of(path, BORROW, "borrower", 2), *ranks_of(path, LEND, "lender", 2)]
    engines[-1].offsets = [0, 8192]
    for engine in engines[:2]:
        await engine.until(lambda one=engine: one.link._channel is not None)
    for engine in engines[2:]:
        await engine.until(lambda one=engine: one.link._channel is not None)
    await engines[-1].until(lambda: engines[-1].link.refused)
    assert broker.counts["refused_memory"] == 2
    for engine in engines:
        engine.close()
    broker.stop()


async def test_a_rank_that_is_none_is_refused(path, broker):
    broker.start(path)
    engine = Engine(path, LEND, "engine", rank=2, n_ranks=2)
    await engine.until(lambda: engine.link.refused)
    assert engine.link.refused == "protocol: rank 2 of 2"
    engine.close()
    broker.stop()


@pytest.mark.parametrize(
    ("role", "pid", "reason"),
    [(LEND, 1, "namespace"), (BORROW, 1, "namespace"), ("steal", None, "protocol")],
)
async def test_an_engine_that_cannot_be_watched_is_refused(path, broker, role, pid, reason):
    broker.start(path)
    engine = Engine(path, role, "engine", pid)
    await engine.until(lambda: engine.link.refused)
    assert engine.link.refused.startswith(f"{reason}:")
    assert broker.counts[f"refused_{reason}"] == 1
    engine.close()
    broker.stop()


async def test_a_peer_that_sends_rubbish_is_dropped_and_the_others_are_served(path, broker):
    broker.start(path)
    bad = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bad.connect(str(path))
    bad.send(b"[1, 2")
    async with asyncio.timeout(10):
        while True:
            await asyncio.sleep(0.01)
            with suppress(BlockingIOError):
                assert bad.recv(10, socket.MSG_DONTWAIT) == b""
                break
    bad.close()
    await test_lender_and_borrower_get_each_others_files(path, broker)


async def test_an_engine_without_a_broker_waits_for_one(path, broker):
    lender = Engine(path, LEND, "lender")
    assert lender.link.receive(0.0) == []
    broker.start(path)
    assert lender.link.receive(0.1) == [] and lender.link._channel is None  # not at once
    assert lender.link.receive(1.0) == [] and lender.link._channel is not None
    lender.close()
    broker.stop()
