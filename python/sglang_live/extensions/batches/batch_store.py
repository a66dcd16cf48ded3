"""Stored batches, their lines, and the results of these.

In: decisions of the runner. Out: batches and lines as they were committed.
A result is first appended to its file and made durable there, then committed together with the
size of the file. What a crash leaves behind that size is overwritten by the next result: a line
either has its result, or runs again.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_live.errors import LiveError
from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.database import Database, storage_errors
from sglang_live.extensions.batches.file_store import FileStore
from sglang_live.extensions.batches.pages import Page
from sglang_live.extensions.batches.records import (
    BATCH,
    CANCELLING,
    COMPLETED,
    ENDED,
    FAILED,
    FILE,
    FINALIZING,
    IN_PROGRESS,
    NO_TOKENS,
    OUTPUT,
    VALIDATING,
    Batch,
    Fault,
    File,
    Line,
    OrderedIds,
    Result,
)
from sglang_live.gateway.errors import cut

_AS_JSON = ("metadata", "moments", "faults")


class NoSuchBatchError(LiveError):
    code = "batch_not_found"
    http_status = 404
    param = "id"

    def __init__(self, batch_id: str):
        super().__init__(f"No batch found with id '{cut(batch_id)}'.")


class BatchEndedError(LiveError):
    code = "batch_ended"
    http_status = 409


class TooManyBatchesError(LiveError):
    code = "too_many_batches"
    http_status = 429


class BatchStore:
    """All methods run in the database's thread. now_s: Unix time."""

    def __init__(
        self,
        database: Database,
        files: FileStore,
        ids: OrderedIds,
        config: BatchConfig,
        now_s: Callable[[], float],
    ):
        self._database = database
        self._files = files
        self._ids = ids
        self._config = config
        self._now_s = now_s

    # --- batches ---

    def create(
        self,
        *,
        owner: str,
        endpoint: str,
        input_file: str,
        metadata: dict[str, str] | None,
        results_kept_s: int | None,
    ) -> Batch:
        """
        Raises:
            NoSuchFileError: the owner has no such file.
            TooManyBatchesError: too many batches of the owner have not ended.
        """
        self._files.get(owner, input_file, "input_file_id")
        [(n_batches,)] = self._database.rows(
            f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status NOT IN {ENDED}", owner
        )
        if n_batches >= self._config.max_key_batches:
            raise TooManyBatchesError(f"This key has {n_batches} batches that have not ended.")
        now_s = int(self._now_s())
        batch = Batch(
            id=self._ids.new(BATCH),
            owner=owner,
            endpoint=endpoint,
            input_file=input_file,
            output_file=self._ids.new(FILE),
            error_file=self._ids.new(FILE),
            created_s=now_s,
            expires_s=now_s + self._config.window_s,
            results_kept_s=results_kept_s or self._config.kept_s,
            metadata=metadata,
        )
        row = asdict(batch)
        with self._database.transaction():
            self._database.insert(
                "batches", row | {name: json.dumps(row[name]) for name in _AS_JSON}
            )
        return batch

    def get(self, owner: str, batch_id: str) -> Batch:
        """Raises NoSuchBatchError, also for a batch of another owner."""
        found = self._database.rows(
            "SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner
        )
        if not found:
            raise NoSuchBatchError(batch_id)
        return _batch(found[0])

    def page(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        rows, has_more = page.read(self._database, "batches", "owner = ?", [owner])
        return [_batch(row) for row in rows], has_more

    def unfinished(self) -> list[Batch]:
        """All batches that have not ended, the oldest first."""
        rows = self._database.rows(f"SELECT * FROM batches WHERE status NOT IN {ENDED} ORDER BY id")
        return [_batch(row) for row in rows]

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Raises NoSuchBatchError, or BatchEndedError."""
        batch = self.get(owner, batch_id)
        if batch.status in ENDED or batch.status == FINALIZING:
            raise BatchEndedError(f"The batch is {batch.status}.")
        if batch.status != CANCELLING:
            with self._database.transaction():
                self._set_status(batch, CANCELLING)
        return self.get(owner, batch_id)

    def delete_old(self) -> None:
        """Delete batches that ended long ago."""
        until_s = self._now_s() - self._config.kept_s - self._config.window_s
        old = f"created_s < ? AND status IN {ENDED}"
        if self._database.rows(f"SELECT 1 FROM batches WHERE {old}", until_s):
            with self._database.transaction():
                self._database.change(f"DELETE FROM batches WHERE {old}", until_s)

    # --- validation ---

    def begin(self, batch_id: str, lines: Sequence[Line]) -> None:
        """Begin a batch whose input is valid. No effect on one that was cancelled meanwhile."""
        batch = self._of_id(batch_id)
        if batch.status != VALIDATING:
            return
        with self._database.transaction():
            self._database.insert_lines(
                [(batch_id, line.n, line.custom_id, line.at, line.n_bytes) for line in lines]
            )
            self._database.change(
                "UPDATE batches SET n_lines = ? WHERE id = ?", len(lines), batch_id
            )
            self._set_status(batch, IN_PROGRESS)

    def fail(self, batch_id: str, faults: Iterable[Fault]) -> None:
        """End a batch whose input is invalid. No effect on one that was cancelled meanwhile."""
        batch = self._of_id(batch_id)
        if batch.status != VALIDATING:
            return
        listed = json.dumps([fault.to_json() for fault in faults])
        with self._database.transaction():
            self._database.change("UPDATE batches SET faults = ? WHERE id = ?", listed, batch_id)
            self._set_status(batch, FAILED)

    # --- lines ---

    def claim(self, batch_id: str, after: int, most: int) -> list[Line]:
        """Lines without a result behind line `after`, at most `most`; they begin now."""
        rows = self._database.rows(
            "SELECT n, custom_id, at, n_bytes, attempts FROM lines "
            "WHERE batch = ? AND done = 0 AND n > ? ORDER BY n LIMIT ?",
            *(batch_id, after, most),
        )
        if not rows:
            return []
        with self._database.transaction():
            self._database.change(
                "UPDATE lines SET attempts = attempts + 1 "
                "WHERE batch = ? AND done = 0 AND n > ? AND n <= ?",
                *(batch_id, after, rows[-1][0]),
            )
        return [
            Line(n=n, custom_id=custom_id, at=at, n_bytes=n_bytes, attempts=attempts + 1)
            for n, custom_id, at, n_bytes, attempts in rows
        ]

    def release(self, batch_id: str, lines: Iterable[int]) -> None:
        """The lines were interrupted by a stop of the server, which is no fault of theirs."""
        with self._database.transaction():
            for n in lines:
                self._database.change(
                    "UPDATE lines SET attempts = attempts - 1 WHERE batch = ? AND n = ?",
                    *(batch_id, n),
                )

    def record(self, batch_id: str, results: Sequence[Result]) -> None:
        """Store results of lines that have none.

        Raises:
            StorageFullError: none of them is stored.
        """
        batch = self._of_id(batch_id)
        succeeded = [result for result in results if result.succeeded]
        others = [result for result in results if not result.succeeded]
        tokens = sum((result.tokens for result in results), NO_TOKENS)
        with storage_errors():
            output_bytes = self._append(batch.output_file, batch.output_bytes, succeeded)
            error_bytes = self._append(batch.error_file, batch.error_bytes, others)
        with self._database.transaction():
            for result in results:
                n_changed = self._database.change(
                    "UPDATE lines SET done = 1 WHERE batch = ? AND n = ? AND done = 0",
                    *(batch_id, result.n),
                )
                assert n_changed == 1, f"line {result.n} has a result already"
            self._database.change(
                "UPDATE batches SET n_completed = n_completed + ?, n_failed = n_failed + ?, "
                "output_bytes = ?, error_bytes = ?, input_tokens = input_tokens + ?, "
                "cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ? WHERE id = ?",
                *(len(succeeded), len(others), output_bytes, error_bytes),
                *(tokens.n_in, tokens.n_cached, tokens.n_out, batch_id),
            )

    def _append(self, file_id: str, n_bytes: int, results: list[Result]) -> int:
        """Append results to a file that has n_bytes. Returns its new size."""
        if not results:
            return n_bytes
        path = self._files.path(file_id)
        is_new = not path.exists()
        with path.open("r+b" if not is_new else "xb") as file:
            file.truncate(n_bytes)
            file.seek(n_bytes)
            file.writelines(result.text for result in results)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        if is_new:
            _sync_folder(path.parent)
        return size

    def finish(self, batch_id: str, status: str) -> None:
        """End a batch whose lines all have a result. Idempotent.

        status: COMPLETED, EXPIRED or CANCELLED.
        """
        batch = self._of_id(batch_id)
        assert batch.n_left == 0 or status != COMPLETED
        if status == COMPLETED and batch.status != FINALIZING:
            with self._database.transaction():
                self._set_status(batch, FINALIZING)
            batch = self._of_id(batch_id)
        now_s = int(self._now_s())
        results = (
            ("output", batch.output_file, batch.output_bytes),
            ("error", batch.error_file, batch.error_bytes),
        )
        with storage_errors():
            for _, file_id, n_bytes in results:
                if n_bytes:
                    os.truncate(self._files.path(file_id), n_bytes)
                else:  # a crash may have left one whose result was not stored
                    self._files.path(file_id).unlink(missing_ok=True)
        with self._database.transaction():
            for kind, file_id, n_bytes in results:
                if n_bytes:
                    file = File(
                        id=file_id,
                        owner=batch.owner,
                        purpose=OUTPUT,
                        name=f"{batch_id}_{kind}.jsonl",
                        n_bytes=n_bytes,
                        created_s=now_s,
                        expires_s=now_s + batch.results_kept_s,
                    )
                    self._database.insert("files", asdict(file))
            self._database.change("DELETE FROM lines WHERE batch = ?", batch_id)
            self._set_status(batch, status)

    def _set_status(self, batch: Batch, status: str) -> None:
        moments = json.dumps({**batch.moments, status: int(self._now_s())})
        self._database.change(
            "UPDATE batches SET status = ?, moments = ? WHERE id = ?", status, moments, batch.id
        )

    def _of_id(self, batch_id: str) -> Batch:
        [row] = self._database.rows("SELECT * FROM batches WHERE id = ?", batch_id)
        return _batch(row)


def _batch(row: Mapping[str, Any]) -> Batch:
    fields = dict(row)
    return Batch(**fields | {name: json.loads(fields[name]) for name in _AS_JSON})


def _sync_folder(folder: Path) -> None:
    """Make the names of new files durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
