"""The database of the Batch API, and the folder that it is in.

In: transactions, from one thread. Out: the same rows after a crash at any moment.
Owner: one Database per folder: a second server with the same folder is refused.
"""

import errno
import fcntl
import hashlib
import hmac
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_bytes
from typing import Any

from sglang_live.errors import BadInputError, CapacityError

_VERSION = 2
_RETRY_AFTER_S = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Primary codes of SQLite; extended codes have more bits.
_SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT, purpose TEXT, name TEXT, n_bytes INTEGER,
    created_s INTEGER, expires_s INTEGER
) WITHOUT ROWID;
CREATE INDEX files_of_owner ON files (owner, id);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT, endpoint TEXT, input_file TEXT, output_file TEXT,
    error_file TEXT, status TEXT, created_s INTEGER, expires_s INTEGER, results_kept_s INTEGER,
    metadata TEXT, moments TEXT, faults TEXT, n_lines INTEGER, n_completed INTEGER,
    n_failed INTEGER, output_bytes INTEGER, error_bytes INTEGER, input_tokens INTEGER,
    cached_tokens INTEGER, output_tokens INTEGER
) WITHOUT ROWID;
CREATE INDEX batches_of_owner ON batches (owner, id);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch TEXT, n INTEGER, custom_id TEXT, at INTEGER, n_bytes INTEGER, attempts INTEGER,
    done INTEGER, PRIMARY KEY (batch, n)
) WITHOUT ROWID;
CREATE INDEX lines_left ON lines (batch, n) WHERE done = 0;
CREATE TABLE secrets (value BLOB);
"""
# What a database of the version before lacks.
_NEW_COLUMNS = ("input_tokens", "cached_tokens", "output_tokens")


class StorageFullError(CapacityError):
    """The disk has no room, or cannot be written. Nothing has changed."""

    code = "storage_full"

    def __init__(self) -> None:
        super().__init__(
            "The server's folder for batches cannot be written at this moment.",
            retry_after_s=_RETRY_AFTER_S,
        )


@contextmanager
def storage_errors() -> Iterator[None]:
    """Context in which a full disk raises StorageFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFullError from error
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in _SQLITE_FULL:
            raise
        raise StorageFullError from error


class Database:
    """Files of results and of clients are in `contents`, each named by its id."""

    def __init__(self, folder: Path):
        """Raises BadInputError: the folder cannot be used, or another server uses it."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.contents = folder / "files"
            self.contents.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._connection = _opened(folder / "batches.sqlite")
        except BlockingIOError:
            raise BadInputError(f"--batch-dir: another server uses {folder}") from None
        except (OSError, sqlite3.Error) as error:
            raise BadInputError(f"--batch-dir: cannot use {folder}: {error}") from error
        [(self._secret,)] = self.rows("SELECT value FROM secrets")

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)

    def owner_of(self, key: str) -> str:
        """What the database has in place of a key: nothing from which the key follows."""
        return hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context whose changes are made together, and are durable at its end.

        Raises:
            StorageFullError: the disk is full; nothing has changed.
        """
        with storage_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, sql: str, *values: Any) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()

    def change(self, sql: str, *values: Any) -> int:
        """Returns the number of rows that changed."""
        assert self._connection.in_transaction
        return self._connection.execute(sql, values).rowcount

    def insert(self, table: str, row: dict[str, Any]) -> None:
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        self.change(f"INSERT INTO {table} ({names}) VALUES ({marks})", *row.values())

    def insert_lines(self, rows: list[tuple[Any, ...]]) -> None:
        assert self._connection.in_transaction
        self._connection.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, 0, 0)", rows)


def _opened(path: Path) -> sqlite3.Connection:
    # A thread of its own runs all statements after this one; it is another one than this.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    # A commit is on the disk when it returns: a client may have seen the result.
    connection.execute("PRAGMA synchronous = FULL")
    [(version,)] = connection.execute("PRAGMA user_version").fetchall()
    if version == 0:
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute("INSERT INTO secrets VALUES (?)", (token_bytes(32),))
        connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("COMMIT")
    elif version == 1:
        connection.execute("BEGIN IMMEDIATE")
        for name in _NEW_COLUMNS:
            connection.execute(f"ALTER TABLE batches ADD COLUMN {name} INTEGER DEFAULT 0")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("COMMIT")
    elif version != _VERSION:
        raise BadInputError(f"--batch-dir: {path} is of another version of this server")
    return connection
