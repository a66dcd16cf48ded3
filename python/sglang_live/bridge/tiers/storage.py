"""The storage tier: tails of sessions' host copies, in a file.

A tail begins where its session's host copy ends, at the start of a page. Writing and reading have
a thread each and keep their order. Completions are processed once a round, on all ranks alike;
until then the host slots are busy, as those of any transfer.
Owner: one StoredTails per session tier, if the server has storage.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.bridge.tiers.session_copies import SessionCopy
from sglang_live.engine_channel.inbox import STORAGE_ENV
from sglang_live.kv.page_file import PageFile
from sglang_live.kv.retention import Compaction

logger = logging.getLogger(__name__)

# Longest wait of a request for its session's tail. A slow disk reads a whole window of a 30 B
# model in that time: 2048 tokens of 96 KiB at 0.2 GB/s.
WAIT_S = 1.0
# Returns the minimum over all ranks of each number.
Agree = Callable[[list[int]], list[int]]


@dataclass(slots=True)
class Tail:
    """Tokens [begin, end) of a session.

    Attributes:
        places: of their pages in the file.
    """

    begin: int
    end: int
    places: list[int]


@dataclass(slots=True, eq=False)
class _Operation:
    """A transfer of tokens [begin, end) between host slots and places in the file.

    Attributes:
        number: of the transfer, as HostCopies counts them.
        done: resolves to the number of leading pages that were transferred intact.
    """

    session_id: str
    copy: SessionCopy
    begin: int
    end: int
    slots: torch.Tensor
    places: list[int]
    number: int
    done: Future[int]


class _Queue:
    """Operations of one direction, and the thread that executes them."""

    def __init__(self, work: Callable[[list[int], list[int]], int]):
        self._work = work
        self.operations: deque[_Operation] = deque()
        self._reset()

    def _reset(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="session-storage")

    def submit(self, slots: list[int], places: list[int]) -> Future[int]:
        return self._worker.submit(self._work, slots, places)

    def drop_all(self) -> list[_Operation]:
        """Wait for running operations, and remove all. Returns them."""
        self._worker.shutdown(wait=True)
        self._reset()
        dropped = list(self.operations)
        self.operations.clear()
        return dropped

    @property
    def n_done(self) -> int:
        n = 0
        for operation in self.operations:
            if not operation.done.done():
                break
            n += 1
        return n


class NoStorage:
    """Of a server without storage."""

    @property
    def n_free_pages(self) -> int:
        return 0

    @property
    def n_storing_tokens(self) -> int:
        """Tokens that are being written to the file; their host slots will be freed."""
        return 0

    @property
    def n_fetching(self) -> int:
        return 0

    def reset(self) -> None: ...

    def end_of(self, session_id: str, on_host: int) -> int:
        """The end of the session's tail; that of its copy on the host if it has none."""
        return on_host

    def is_fetching(self, session_id: str, now_s: float) -> bool:
        return False

    def store(self, session_id: str, n_pages: int) -> bool:
        return False

    def fetch(self, session_id: str, now_s: float) -> bool:
        """Begin to read the whole tail to the host, if there is one and memory for it.

        Returns whether the copies on the host are to be ranked anew.
        """
        return False

    def settle(self) -> list[str]:
        return []

    def truncated(self, session_id: str, n_tokens: int) -> None: ...

    def compact(self, session_id: str, compaction: Compaction) -> None: ...

    def forget_unless_contiguous(self, session_id: str) -> None: ...

    def report(self) -> dict[str, float]:
        return {}


class StoredTails(NoStorage):
    """
    Args:
        agree: see Agree.
    """

    def __init__(self, copies: HostCopies, file: PageFile, agree: Agree):
        self._copies = copies
        self._file = file
        self._agree = agree
        # Pages are verified here before they are copied into the pool.
        self._page = copies.pool.get_data_page(0, flat=True).clone()
        self._tails: dict[str, Tail] = {}
        self._stores = _Queue(self._write)
        self._fetches = _Queue(self._read)
        self._storing: set[str] = set()
        self._fetching: dict[str, float] = {}  # since when
        self.counts = dict.fromkeys(
            (
                "tokens_stored",
                "storage_writes_failed",
                "tokens_fetched",
                "fetches_without_room",
                "pages_damaged",
            ),
            0.0,
        )

    def reset(self) -> None:
        """To be called when SGLang has emptied the host's pool. Waits for transfers into it."""
        for operation in self._stores.drop_all():
            self._file.free(operation.places)
        for operation in self._fetches.drop_all():
            if not self._is_tail(operation):
                self._file.free(operation.places)
        self._storing.clear()
        self._fetching.clear()
        for session_id in list(self._tails):
            self.forget(session_id)

    @property
    def tokens(self) -> int:
        return sum(tail.end - tail.begin for tail in self._tails.values())

    @property
    def n_free_pages(self) -> int:
        return self._file.n_free

    @property
    def n_storing_tokens(self) -> int:
        return sum(len(operation.slots) for operation in self._stores.operations)

    def end_of(self, session_id: str, on_host: int) -> int:
        tail = self._tails.get(session_id)
        return on_host if tail is None else tail.end

    @property
    def n_fetching(self) -> int:
        return len(self._fetching)

    def is_fetching(self, session_id: str, now_s: float) -> bool:
        """Whether a read has been running for less than WAIT_S; after that the request computes
        the tokens.
        """
        return now_s - self._fetching.get(session_id, -WAIT_S) < WAIT_S

    # --- to the file and back ---

    def store(self, session_id: str, n_pages: int) -> bool:
        """Begin to move the last pages of a host copy.

        Returns False if the copy is busy, or the file is full.
        """
        copy = self._copies.of(session_id)
        if copy is None or copy.busy or session_id in self._storing:
            return False
        places = self._file.take(n_pages)
        if places is None:
            return False
        begin = copy.begin + len(copy.slots) - n_pages * self._page_size
        slots = copy.slots[begin - copy.begin :]
        self._storing.add(session_id)
        self._begin(self._stores, session_id, copy, begin, copy.end, slots, places)
        return True

    def fetch(self, session_id: str, now_s: float) -> bool:
        tail, copy = self._tails.get(session_id), self._copies.of(session_id)
        if tail is None or session_id in self._fetching or session_id in self._storing:
            return True
        assert copy is not None  # a tail without its copy is forgotten
        slots = self._copies.take_slots(session_id, len(tail.places) * self._page_size)
        if slots is None:
            self.counts["fetches_without_room"] += 1
            return True
        self._fetching[session_id] = now_s
        self._begin(self._fetches, session_id, copy, tail.begin, tail.end, slots, tail.places)
        return True

    def _begin(
        self,
        queue: _Queue,
        session_id: str,
        copy: SessionCopy,
        begin: int,
        end: int,
        slots: torch.Tensor,
        places: list[int],
    ) -> None:
        number = self._copies.new_number()
        copy.busy.add(number)
        done = queue.submit(slots[:: self._page_size].tolist(), places)
        operation = _Operation(session_id, copy, begin, end, slots, places, number, done)
        queue.operations.append(operation)

    def _write(self, slots: list[int], places: list[int]) -> int:
        for n, (slot, place) in enumerate(zip(slots, places, strict=True)):
            page = self._copies.pool.get_data_page(slot, flat=True)
            try:
                self._file.write(place, _bytes_of(page))
            except OSError as error:
                if not self.counts["storage_writes_failed"]:
                    logger.error("session storage cannot be written: %s", error)
                self.counts["storage_writes_failed"] += 1
                return n
        return len(slots)

    def _read(self, slots: list[int], places: list[int]) -> int:
        for n, (slot, place) in enumerate(zip(slots, places, strict=True)):
            try:
                is_right = self._file.read(place, _bytes_of(self._page))
            except OSError as error:
                logger.error("session storage cannot be read: %s", error)
                return n
            if not is_right:
                logger.error("session storage: a page is damaged")
                return n
            self._copies.pool.set_from_flat_data_page(slot, self._page)
        return len(slots)

    # --- completions ---

    def settle(self) -> list[str]:
        """Process completed transfers; to be called once a round.

        Returns the sessions whose host copies may have changed.
        """
        queues = ((self._stores, self._stored), (self._fetches, self._fetched))
        if not any(queue.operations for queue, _ in queues):
            return []
        n_done = self._agree([queue.n_done for queue, _ in queues])
        ended = [
            (queue.operations.popleft(), settled)
            for (queue, settled), n in zip(queues, n_done, strict=True)
            for _ in range(n)
        ]
        if not ended:
            return []
        n_right = self._agree([operation.done.result() for operation, _ in ended])
        for (operation, settled), n_pages in zip(ended, n_right, strict=True):
            operation.copy.busy.discard(operation.number)
            settled(operation, n_pages)
            self._copies.free_if_gone(operation.copy)
        return [operation.session_id for operation, _ in ended]

    def _stored(self, operation: _Operation, n_pages: int) -> None:
        copy, session_id = operation.copy, operation.session_id
        self._storing.discard(session_id)
        # The copy's last page may have been rewritten, or be in a transfer to the device.
        is_unchanged = not copy.gone and copy.end == operation.end and not copy.busy
        if not is_unchanged or n_pages < len(operation.places):
            self._file.free(operation.places)
            return
        tail = self._tails.get(session_id)
        if tail is None:
            tail = self._tails[session_id] = Tail(copy.end, copy.end, [])
        tail.begin, tail.places = operation.begin, operation.places + tail.places
        self._copies.shorten(session_id, operation.begin)
        self.counts["tokens_stored"] += operation.end - operation.begin

    def _fetched(self, operation: _Operation, n_pages: int) -> None:
        copy, session_id = operation.copy, operation.session_id
        del self._fetching[session_id]
        self.counts["pages_damaged"] += len(operation.places) - n_pages
        is_wanted = not copy.gone and self._is_tail(operation)
        n_slots = n_pages * self._page_size if is_wanted else 0
        if n_slots:
            end = min(operation.end, operation.begin + n_slots)
            self._copies.lengthen(session_id, operation.slots[:n_slots], end)
            self.counts["tokens_fetched"] += end - operation.begin
        self._copies.free_slots(operation.slots[n_slots:])
        if self._is_tail(operation):
            del self._tails[session_id]
        self._file.free(operation.places)

    def _is_tail(self, operation: _Operation) -> bool:
        tail = self._tails.get(operation.session_id)
        return tail is not None and tail.places is operation.places

    # --- the session changes ---

    def forget(self, session_id: str) -> None:
        tail = self._tails.pop(session_id, None)
        if tail is not None and not self._is_read(tail):
            self._file.free(tail.places)

    def _is_read(self, tail: Tail) -> bool:
        """Whether the tail is being read; its places are then freed at the end of the read."""
        return any(operation.places is tail.places for operation in self._fetches.operations)

    def truncated(self, session_id: str, n_tokens: int) -> None:
        """To be called when the session, and its host copy, were truncated to n_tokens."""
        tail = self._tails.get(session_id)
        if tail is None or n_tokens >= tail.end:
            return
        if n_tokens <= tail.begin or self._is_read(tail):
            self.forget(session_id)
            return
        n_pages = ceil_align(n_tokens - tail.begin, self._page_size) // self._page_size
        self._file.free(tail.places[n_pages:])
        tail.end, tail.places = n_tokens, tail.places[:n_pages]

    def compact(self, session_id: str, compaction: Compaction) -> None:
        """To be called when the session, and its host copy, have lost these whole pages."""
        begin, end, n_tokens = compaction.begin, compaction.end, compaction.n_tokens
        tail = self._tails.get(session_id)
        if tail is None or tail.end <= begin:
            return
        if self._is_read(tail):
            self.forget(session_id)
            return
        first = (max(begin, tail.begin) - tail.begin) // self._page_size
        behind = max(0, end - tail.begin) // self._page_size
        self._file.free(tail.places[first:behind])
        tail.places = tail.places[:first] + tail.places[max(first, behind) :]
        if begin < tail.begin:
            tail.begin = max(begin, tail.begin - n_tokens)
        tail.end = max(tail.end - n_tokens, begin)
        if not tail.places:
            self.forget(session_id)

    def forget_unless_contiguous(self, session_id: str) -> None:
        """Drop the tail if it does not begin where its host copy ends.

        To be called when the copy has changed.
        """
        tail, copy = self._tails.get(session_id), self._copies.of(session_id)
        if tail is not None and (copy is None or copy.end != tail.begin):
            self.forget(session_id)

    def report(self) -> dict[str, float]:
        return {**self.counts, "tokens_in_storage": float(self.tokens)}

    @property
    def _page_size(self) -> int:
        return self._copies.page_size


def _bytes_of(page: torch.Tensor) -> np.ndarray:
    array: np.ndarray = page.contiguous().view(torch.uint8).numpy()
    return array


def storage_from_env(copies: HostCopies, agree: Agree) -> NoStorage:
    """As STORAGE_ENV says."""
    text = os.environ.get(STORAGE_ENV, "")
    if not text:
        return NoStorage()
    n_bytes, _, directory = text.partition(":")
    page_bytes = copies.bytes_per_token * copies.page_size
    return StoredTails(copies, PageFile(Path(directory), page_bytes, int(n_bytes)), agree)
