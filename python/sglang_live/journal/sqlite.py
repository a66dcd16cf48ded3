"""A journal in one file, for the gateways of one machine."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sglang_live.journal.store import Kept, Outcome, StoreError, Write

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (
    id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, token TEXT NOT NULL, expires_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS record (
    session TEXT NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (session, name)
);
"""
_FIND = "SELECT epoch, expires_s FROM session WHERE id = ? AND expires_s > ?"
_KEEP = "UPDATE session SET expires_s = ?, token = ifnull(?, token) WHERE id = ?"
# A session expires by this share of its time too early: most writes then change one page.
_TOO_EARLY = 0.02
# What is replaced stays where it is: REPLACE would write two pages of the index, too.
_PUT = "INSERT INTO record VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET data = excluded.data"
# A search of all sessions, which costs as much as some writes.
_CLEAN_S = 10.0
# Another gateway holds the file for the time of a write.
_BUSY_S = 2.0


class SqliteStore:
    def __init__(self, path: Path):
        self._path = path
        # One connection, in the thread that has made it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._file: sqlite3.Connection | None = None
        self._clean_at_s = 0.0

    async def open(self) -> None:
        await self._in_thread(self._connect)

    async def write(self, writes: Sequence[Write], keep_s: float) -> list[Outcome]:
        return await self._in_thread(lambda: self._write(writes, time.time(), keep_s))

    async def read(self, session_id: str) -> Kept | None:
        return await self._in_thread(lambda: self._read(session_id))

    async def take(self, session_id: str, epoch: int, token: str) -> bool:
        taken = (
            "UPDATE session SET epoch = epoch + 1, token = '' "
            "WHERE id = ? AND epoch = ? AND token = ? AND token != '' AND expires_s > ?"
        )
        values = (session_id, epoch, token, time.time())
        return await self._in_thread(lambda: bool(self._change(taken, values)))

    async def delete(self, session_id: str, epoch: int) -> None:
        await self._in_thread(lambda: self._delete("id = ? AND epoch = ?", session_id, epoch))

    async def close(self) -> None:
        if self._file is not None:
            await self._in_thread(self._file.close)
        self._thread.shutdown()

    def _connect(self) -> None:
        file = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",  # a gateway that is killed loses nothing
            "secure_delete = ON",  # no deleted speech stays in the file
            "wal_autocheckpoint = 4000",  # pages: of one that changes often, the last is copied
        ):
            file.execute(f"PRAGMA {pragma}")
        file.executescript(_SCHEMA)
        self._file = file

    def _write(self, writes: Sequence[Write], now_s: float, keep_s: float) -> list[Outcome]:
        with self._transaction() as file:
            outcomes = [self._write_one(file, write, now_s, keep_s) for write in writes]
        if now_s >= self._clean_at_s:
            self._clean_at_s = now_s + _CLEAN_S
            self._delete("expires_s <= ?", now_s)
        return outcomes

    def _write_one(
        self, file: sqlite3.Connection, write: Write, now_s: float, keep_s: float
    ) -> Outcome:
        session_id, until_s = write.session_id, now_s + keep_s
        found = file.execute(_FIND, (session_id, now_s)).fetchone()
        if found is None and not write.is_first:
            return Outcome.GONE
        if found is None:
            begun = (session_id, write.epoch, write.token, until_s)
            file.execute("INSERT INTO session VALUES (?, ?, ?, ?)", begun)
        elif found[0] != write.epoch:
            return Outcome.TAKEN
        elif write.token or found[1] < until_s - _TOO_EARLY * keep_s:
            file.execute(_KEEP, (until_s, write.token or None, session_id))
        gone = [(session_id, name) for name, data in write.records.items() if data is None]
        if gone:
            file.executemany("DELETE FROM record WHERE session = ? AND name = ?", gone)
        rows = [(session_id, *one) for one in write.records.items() if one[1] is not None]
        file.executemany(_PUT, rows)
        return Outcome.WRITTEN

    def _delete(self, which: str, *values: object) -> None:
        """which: condition on sessions."""
        with self._transaction() as file:
            found = f"SELECT id FROM session WHERE {which}"
            file.execute(f"DELETE FROM record WHERE session IN ({found})", values)
            file.execute(f"DELETE FROM session WHERE {which}", values)

    def _read(self, session_id: str) -> Kept | None:
        with self._transaction() as file:
            find = "SELECT epoch, token FROM session WHERE id = ? AND expires_s > ?"
            found = file.execute(find, (session_id, time.time())).fetchone()
            rows = file.execute("SELECT name, data FROM record WHERE session = ?", (session_id,))
            if found is None:
                return None
            epoch, token = found
            return Kept(session_id, epoch, token, dict(rows.fetchall()))

    def _transaction(self) -> "_Transaction":
        assert self._file is not None, "open() comes first"
        return _Transaction(self._file)

    def _change(self, statement: str, values: tuple[object, ...]) -> int:
        with self._transaction() as file:
            return file.execute(statement, values).rowcount

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StoreError(f"journal {self._path}: {error}") from error


class _Transaction:
    """Has the file to itself from its beginning, so that what it reads holds when it writes."""

    def __init__(self, file: sqlite3.Connection):
        self._file = file

    def __enter__(self) -> sqlite3.Connection:
        self._file.execute("BEGIN IMMEDIATE")
        return self._file

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._file.execute("COMMIT" if error is None else "ROLLBACK")
