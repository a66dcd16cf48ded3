"""Stored files: those of clients and those of results.

In: contents, ids of owners. Out: File, or an error that does not say whether another owner has it.
A file exists when its row does; contents without a row are deleted at the next start.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from sglang_live.errors import LiveError
from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.database import Database, storage_errors
from sglang_live.extensions.batches.pages import Page
from sglang_live.extensions.batches.records import ENDED, FILE, INPUT, File, OrderedIds, is_id
from sglang_live.gateway.errors import cut

_COPIED_BYTES = 1 << 20
_NOT_ENDED = f"status NOT IN {ENDED}"


class NoSuchFileError(LiveError):
    code = "file_not_found"
    http_status = 404

    def __init__(self, file_id: str, param: str = "id"):
        super().__init__(f"No such File object: {cut(file_id)}")
        self.param = param


class FileInUseError(LiveError):
    code = "file_in_use"
    http_status = 409


class KeyStorageFullError(LiveError):
    code = "key_storage_full"
    http_status = 403


class FileStore:
    """All methods but `write` run in the database's thread. now_s: Unix time."""

    def __init__(
        self, database: Database, ids: OrderedIds, config: BatchConfig, now_s: Callable[[], float]
    ):
        self._database = database
        self._ids = ids
        self._config = config
        self._now_s = now_s
        self._remove_contents_without_rows()

    def path(self, file_id: str) -> Path:
        assert is_id(file_id, FILE), "an id of a client was not checked"
        return self._database.contents / file_id

    def write(self, source: BinaryIO) -> tuple[str, int]:
        """Write the contents of a file that does not exist yet; in any thread.

        Returns:
            Its id and its size.
        Raises:
            StorageFullError: nothing is left of it.
        """
        file_id = self._ids.new(FILE)
        path = self.path(file_id)
        with storage_errors():
            try:
                with path.open("xb") as target:
                    shutil.copyfileobj(source, target, _COPIED_BYTES)
                    target.flush()
                    os.fsync(target.fileno())
                    return file_id, target.tell()
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def add(self, file: File) -> None:
        """Make a file of contents that were written.

        Raises:
            KeyStorageFullError: its owner has too much; the contents are deleted.
            StorageFullError: the disk is full; the contents are deleted.
        """
        try:
            self._check_room(file.owner, file.n_bytes)
            with self._database.transaction():
                self._database.insert("files", asdict(file))
        except BaseException:
            self.path(file.id).unlink(missing_ok=True)
            raise

    def _check_room(self, owner: str, n_bytes: int) -> None:
        [(n_files,)] = self._database.rows("SELECT COUNT(*) FROM files WHERE owner = ?", owner)
        if n_files >= self._config.max_key_files:
            raise KeyStorageFullError(
                f"This key has {n_files} files, its limit: delete some of them."
            )
        if self.used_bytes(owner) + n_bytes > self._config.max_key_bytes:
            raise KeyStorageFullError(
                f"The files of a key may have at most {self._config.max_key_bytes} bytes: "
                "delete some of them."
            )

    def used_bytes(self, owner: str) -> int:
        """Size of an owner's files, and of the results of its batches so far."""
        [(n_files,)] = self._database.rows(
            "SELECT COALESCE(SUM(n_bytes), 0) FROM files WHERE owner = ?", owner
        )
        [(n_results,)] = self._database.rows(
            "SELECT COALESCE(SUM(output_bytes + error_bytes), 0) FROM batches "
            f"WHERE owner = ? AND {_NOT_ENDED}",
            owner,
        )
        return int(n_files + n_results)

    def get(self, owner: str, file_id: str, param: str = "id") -> File:
        """Raises NoSuchFileError, also for a file of another owner."""
        found = self._database.rows(
            "SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner
        )
        if not found or self._is_over(file := _file(found[0])):
            raise NoSuchFileError(file_id, param)
        return file

    def page(self, owner: str, page: Page, purpose: str | None) -> tuple[list[File], bool]:
        """The files of a page, and whether others follow."""
        where, values = "owner = ?", [owner]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [owner, purpose]
        rows, has_more = page.read(self._database, "files", where, values)
        return [file for row in rows if not self._is_over(file := _file(row))], has_more

    def delete(self, owner: str, file_id: str) -> None:
        """
        Raises:
            NoSuchFileError: as get.
            FileInUseError: a batch that has not ended needs it.
        """
        self.get(owner, file_id)
        if self._in_use(file_id):
            raise FileInUseError(
                f"A batch that has not ended uses {file_id}: cancel it, or wait for its end."
            )
        self._delete(file_id)

    def delete_old(self) -> None:
        """Delete the files whose lifetime is over, except those that a batch needs."""
        over = self._database.rows("SELECT id FROM files WHERE expires_s <= ?", self._now_s())
        for (file_id,) in over:
            if not self._in_use(file_id):
                self._delete(file_id)

    def _in_use(self, file_id: str) -> bool:
        return bool(
            self._database.rows(
                f"SELECT 1 FROM batches WHERE input_file = ? AND {_NOT_ENDED}", file_id
            )
        )

    def _delete(self, file_id: str) -> None:
        with self._database.transaction():
            self._database.change("DELETE FROM files WHERE id = ?", file_id)
        self.path(file_id).unlink(missing_ok=True)

    def _is_over(self, file: File) -> bool:
        # The input of a batch that runs stays until its end, but only for the batch.
        return file.expires_s is not None and file.expires_s <= self._now_s()

    def _remove_contents_without_rows(self) -> None:
        known = {file_id for (file_id,) in self._database.rows("SELECT id FROM files")}
        results = self._database.rows(
            f"SELECT output_file, error_file FROM batches WHERE {_NOT_ENDED}"
        )
        known.update(*results)
        for path in self._database.contents.iterdir():
            if path.name not in known:
                path.unlink()


def new_input(
    file_id: str, *, owner: str, name: str, n_bytes: int, created_s: int, kept_s: int
) -> File:
    return File(
        id=file_id,
        owner=owner,
        purpose=INPUT,
        name=name,
        n_bytes=n_bytes,
        created_s=created_s,
        expires_s=created_s + kept_s,
    )


def _file(row: Mapping[str, Any]) -> File:
    return File(**dict(row))
