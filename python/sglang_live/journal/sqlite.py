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
CREATE INDEX IF NOT EXISTS session_by_expiry ON session (expires_s);
CREATE TABLE IF NOT EXISTS record (
    session TEXT NOT NULL REFERENCES session ON DELETE CASCADE,
    name TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (session, name)
);
"""
# Another gateway holds the file for the time of a write.
_BUSY_S = 2.0


class SqliteStore:
    def __init__(self, path: Path):
        self._path = path
        # One connection, in the thread that has made it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._file: sqlite3.Connection | None = None

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
        return bool(await self._change(taken, session_id, epoch, token, time.time()))

    async def delete(self, session_id: str, epoch: int) -> None:
        await self._change("DELETE FROM session WHERE id = ? AND epoch = ?", session_id, epoch)

    async def close(self) -> None:
        if self._file is not None:
            await self._in_thread(self._file.close)
        self._thread.shutdown()

    def _connect(self) -> None:
        file = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",  # a gateway that is killed loses nothing
            "foreign_keys = ON",
            "secure_delete = ON",  # no deleted speech stays in the file
        ):
            file.execute(f"PRAGMA {pragma}")
        file.executescript(_SCHEMA)
        self._file = file

    def _write(self, writes: Sequence[Write], now_s: float, keep_s: float) -> list[Outcome]:
        with self._transaction() as file:
            file.execute("DELETE FROM session WHERE expires_s <= ?", (now_s,))
            return [self._write_one(file, write, now_s + keep_s) for write in writes]

    def _write_one(self, file: sqlite3.Connection, write: Write, expires_s: float) -> Outcome:
        session_id = write.session_id
        found = file.execute("SELECT epoch FROM session WHERE id = ?", (session_id,)).fetchone()
        if found is None and not write.is_first:
            return Outcome.GONE
        if found is None:
            begun = (session_id, write.epoch, write.token, expires_s)
            file.execute("INSERT INTO session VALUES (?, ?, ?, ?)", begun)
        elif found[0] != write.epoch:
            return Outcome.TAKEN
        else:
            kept = "UPDATE session SET expires_s = ?, token = ifnull(?, token) WHERE id = ?"
            file.execute(kept, (expires_s, write.token or None, session_id))
        for name, data in write.records.items():
            if data is None:
                file.execute(
                    "DELETE FROM record WHERE session = ? AND name = ?", (session_id, name)
                )
            else:
                row = (session_id, name, data)
                file.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?)", row)
        return Outcome.WRITTEN

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

    async def _change(self, statement: str, *values: object) -> int:
        def change() -> int:
            with self._transaction() as file:
                return file.execute(statement, values).rowcount

        return await self._in_thread(change)

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
