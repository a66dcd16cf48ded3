"""Runs the lines of all batches, as many at a time as pace.py allows.

In: what the store has; the load of the server. Out: results in the store.
Owner: one Runner per process. Only results that are committed count: after a crash, the lines that
had none run again.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.aio import background
from sglang_live.extensions.batches.database import StorageFullError
from sglang_live.extensions.batches.input_lines import CheckedInput, check_input
from sglang_live.extensions.batches.line_run import LineRuns, failure
from sglang_live.extensions.batches.metrics import BatchMetrics
from sglang_live.extensions.batches.pace import Load, lines_at_once
from sglang_live.extensions.batches.records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    Batch,
    Fault,
    Line,
    Result,
)
from sglang_live.extensions.batches.store import Store
from sglang_live.gateway.draining import Drain

log = logging.getLogger(__name__)

STORAGE_FULL, KEY_STORAGE_FULL = "storage_full", "key_storage_full"
# The pace, the clock and the disk are looked at this often.
_TICK_S = 1.0
_CLEANING_S = 3600.0
# Lines of a batch that ends early get their results in groups of this size.
_GROUP_LINES = 1000
_UNRUN = {
    EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was executed."),
}


@dataclass(eq=False, slots=True)
class _Begun:
    """Lines of one batch in this process. after: the last one that was claimed."""

    after: int = 0
    exhausted: bool = False
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class Runner:
    """
    keys: the keys of the server; a batch whose key is not among them waits.
    check_model: raises ModelNotFoundError.
    load: of the server now.
    """

    def __init__(
        self,
        store: Store,
        lines: LineRuns,
        *,
        keys: Iterable[str],
        check_model: Callable[[str | None], None],
        load: Callable[[], Load],
        drain: Drain,
        metrics: BatchMetrics,
    ):
        self._store = store
        self._lines = lines
        self._check_model = check_model
        self._load = load
        self._drain = drain
        self._metrics = metrics
        self._keys = {store.owner_of(key): key for key in keys}
        self._begun: dict[str, _Begun] = {}
        self._done: list[tuple[Batch, Result]] = []  # not committed yet
        self._validating: dict[str, asyncio.Task[None]] = {}
        self._at_once = 0  # lines that pace.py allowed last
        self._paced_s = 0.0
        self._wake = asyncio.Event()
        self._closing = False
        self._full_until_s = 0.0
        self._cleaned_s = 0.0
        self._full_owners: set[str] = set()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run(), name="batches")

    def wake(self) -> None:
        """There is a new batch, or one is cancelled."""
        self._wake.set()

    def paused(self, batch: Batch) -> str | None:
        """Why no line of the batch starts; None if its lines start as the load allows."""
        if self._full_until_s:
            return STORAGE_FULL
        return KEY_STORAGE_FULL if batch.owner in self._full_owners else None

    async def close(self) -> None:
        """Interrupt what runs. Results that are there are stored, the other lines run again."""
        # A step is not cancelled: its statements would go on in the store's thread.
        self._closing = True
        self.wake()
        if self._loop:
            await self._loop
        left = {id: tuple(begun.running) for id, begun in self._begun.items() if begun.running}
        await _cancelled(self._validating.values())
        for begun in self._begun.values():
            await _cancelled(begun.running.values())
        stored = {(batch.id, result.n) for batch, result in self._done}
        try:
            await self._commit()
            for batch_id, lines in left.items():
                interrupted = [n for n in lines if (batch_id, n) not in stored]
                await self._store.run(self._store.batches.release, batch_id, interrupted)
        except StorageFullError:
            log.error("batch_results_lost n=%d: the disk is full", len(stored))
        self._store.close()

    async def _run(self) -> None:
        while not self._closing:
            try:
                await self._step()
            except StorageFullError:
                now_s = asyncio.get_running_loop().time()
                if not self._full_until_s:
                    log.error("batches_paused reason=%s", STORAGE_FULL)
                self._full_until_s = now_s + self._store.config.retry_s
            except Exception:
                log.exception("batches_step_failed")
            self._metrics.paused.labels(STORAGE_FULL).set(bool(self._full_until_s))
            self._metrics.paused.labels(KEY_STORAGE_FULL).set(len(self._full_owners))
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    async def _step(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._full_until_s:
            return
        await self._commit()
        await self._clean(now_s)
        batches = await self._store.run(self._store.batches.unfinished)
        self._validate([batch for batch in batches if batch.status == VALIDATING])
        for batch in batches:
            await self._end(batch)
        await self._start_lines([batch for batch in batches if self._may_run(batch)])
        self._report(batches)
        if self._full_until_s:
            log.info("batches_resumed")
            self._full_until_s = 0.0

    async def _clean(self, now_s: float) -> None:
        if now_s >= self._cleaned_s + _CLEANING_S or not self._cleaned_s:
            await self._store.run(self._store.files.delete_old)
            await self._store.run(self._store.batches.delete_old)
            self._cleaned_s = now_s

    # --- validation ---

    def _validate(self, batches: list[Batch]) -> None:
        for batch in batches:
            if not self._validating and batch.owner in self._keys:
                task = background(self._validated(batch), "batch validation")
                self._validating[batch.id] = task

    async def _validated(self, batch: Batch) -> None:
        try:
            checked = await asyncio.to_thread(self._checked, batch)
            if checked.faults:
                await self._store.run(self._store.batches.fail, batch.id, checked.faults)
                self._metrics.batches.labels(FAILED).inc()
            else:
                await self._store.run(self._store.batches.begin, batch.id, checked.lines)
        except StorageFullError:
            self._full_until_s = asyncio.get_running_loop().time() + self._store.config.retry_s
        finally:
            self._validating.pop(batch.id, None)
            self.wake()

    def _checked(self, batch: Batch) -> CheckedInput:
        path = self._store.files.path(batch.input_file)
        try:
            return check_input(path, batch.endpoint, self._check_model, self._store.config)
        except Exception:  # a bug, or a file that an operator removed: tried again without end
            log.exception("batch_input_unreadable batch=%s", batch.id)
            fault = Fault(code="server_error", message="The input file could not be read.")
            return CheckedInput(faults=[fault])

    # --- ends ---

    async def _end(self, batch: Batch) -> None:
        """End a batch that is complete, cancelled or over its time."""
        begun = self._begun.get(batch.id)
        if batch.status == FINALIZING or (batch.status == IN_PROGRESS and not batch.n_left):
            await self._finish(batch, COMPLETED)
        elif batch.status == CANCELLING and not (begun and begun.running):
            await self._end_early(batch, CANCELLED)
        elif batch.status in (VALIDATING, IN_PROGRESS) and self._store.now_s() >= batch.expires_s:
            if begun:
                await _cancelled(begun.running.values())
                begun.running.clear()
            await self._end_early(batch, EXPIRED)

    async def _end_early(self, batch: Batch, status: str) -> None:
        """Give the lines that did not run their results, and end the batch."""
        await self._commit()
        code, message = _UNRUN[status]
        claim, record = self._store.batches.claim, self._store.batches.record
        while lines := await self._store.run(claim, batch.id, 0, _GROUP_LINES):
            results = [failure(line, code, message) for line in lines]
            await self._store.run(record, batch.id, results)
            self._metrics.lines.labels(status).inc(len(lines))
        await self._finish(batch, status)

    async def _finish(self, batch: Batch, status: str) -> None:
        await self._store.run(self._store.batches.finish, batch.id, status)
        self._begun.pop(batch.id, None)
        self._metrics.batches.labels(status).inc()
        log.info("batch_ended batch=%s status=%s", batch.id, status)

    # --- lines ---

    def _may_run(self, batch: Batch) -> bool:
        return (
            batch.status == IN_PROGRESS
            and batch.owner in self._keys
            and self._store.now_s() < batch.expires_s
            and not self._drain.began.is_set()
        )

    async def _start_lines(self, batches: list[Batch]) -> None:
        n_free = self._paced() - self._n_running()
        open_batches = await self._with_room(batches)
        n_running = Counter({batch.owner: 0 for batch in open_batches})
        for batch in batches:
            if batch.id in self._begun:
                n_running[batch.owner] += len(self._begun[batch.id].running)
        while n_free > 0 and open_batches:
            # The key with the fewest running lines is next; of its batches, the oldest.
            batch = min(open_batches, key=lambda b: (n_running[b.owner], b.id))
            if not await self._start_line(batch):
                open_batches.remove(batch)
                continue
            n_running[batch.owner] += 1
            n_free -= 1

    def _paced(self) -> int:
        load, now_s = self._load(), asyncio.get_running_loop().time()
        # The engines do not say more often what they do.
        if load.best_effort is None or now_s >= self._paced_s + _TICK_S:
            most, n_running = self._store.config.at_once, self._n_running()
            self._at_once = lines_at_once(load, most, self._at_once, n_running)
            self._paced_s = now_s
            self._metrics.at_once.set(self._at_once)
        return self._at_once

    def _n_running(self) -> int:
        return sum(len(begun.running) for begun in self._begun.values())

    async def _with_room(self, batches: list[Batch]) -> list[Batch]:
        """The batches whose owners may store more."""
        owners, limit = {batch.owner for batch in batches}, self._store.config.max_key_bytes
        used = {
            owner: await self._store.run(self._store.files.used_bytes, owner) for owner in owners
        }
        self._full_owners = {owner for owner, n_bytes in used.items() if n_bytes >= limit}
        return [batch for batch in batches if batch.owner not in self._full_owners]

    async def _start_line(self, batch: Batch) -> bool:
        """Start the next line of a batch. Returns False if all of its lines have begun."""
        begun = self._begun.setdefault(batch.id, _Begun())
        if begun.exhausted:
            return False
        claimed = await self._store.run(self._store.batches.claim, batch.id, begun.after, 1)
        if not claimed:
            begun.exhausted = True
            return False
        [line] = claimed
        begun.after = line.n
        task = asyncio.create_task(self._run_line(batch, line, begun))
        begun.running[line.n] = task
        return True

    async def _run_line(self, batch: Batch, line: Line, begun: _Begun) -> None:
        self._drain.begin_serving()
        try:
            result = await self._result(batch, line)
            self._done.append((batch, result))
        finally:
            # Cancelled lines are still in `running`, so that close() finds them.
            self._drain.end_serving()
            self.wake()
        begun.running.pop(line.n, None)

    async def _result(self, batch: Batch, line: Line) -> Result:
        path = self._store.files.path(batch.input_file)
        try:
            text = await asyncio.to_thread(_read, path, line)
            return await self._lines.run(self._keys[batch.owner], batch, line, text)
        except Exception:  # as above
            log.exception("batch_line_failed batch=%s line=%d", batch.id, line.n)
            return failure(line, "server_error", "The server had an error with this request.")

    async def _commit(self) -> None:
        """Store the results that there are.

        Raises:
            StorageFullError: they are kept, for the next time.
        """
        by_batch: dict[str, list[Result]] = {}
        for batch, result in self._done:
            by_batch.setdefault(batch.id, []).append(result)
        for batch_id, results in by_batch.items():
            await self._store.run(self._store.batches.record, batch_id, results)
            stored = {result.n for result in results}
            self._done[:] = [
                (batch, result)
                for batch, result in self._done
                if batch.id != batch_id or result.n not in stored
            ]
            for result in results:
                self._metrics.lines.labels("completed" if result.succeeded else "failed").inc()

    def _report(self, batches: list[Batch]) -> None:
        n_running = self._n_running()
        self._metrics.running.set(n_running)
        n_left = sum(batch.n_left for batch in batches)
        self._metrics.waiting.set(max(0, n_left - n_running - len(self._done)))
        states: Mapping[str, int] = Counter(batch.status for batch in batches)
        for status in (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING):
            self._metrics.open.labels(status).set(states.get(status, 0))


def _read(path: Path, line: Line) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), line.n_bytes, line.at)


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    listed = list(tasks)
    for task in listed:
        task.cancel()
    await asyncio.gather(*listed, return_exceptions=True)
