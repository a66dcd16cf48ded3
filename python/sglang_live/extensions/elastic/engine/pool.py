"""A KV pool that grows and shrinks at its end while its engine serves.

Growing adds pages to SGLang's allocator. Shrinking first drains: free pages of the tail leave the
allocator at once, the others as they are freed; when all are out, the memory behind them is
unmapped. Mapping is work of a thread of its own, because each call interrupts all cores.
In: orders of the mover. Out: the pool's capacity, and runs of granules. Owner: one per scheduler.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from torch import Tensor

from sglang_live.extensions.elastic.engine.elastic_memory import ElasticMemory, Passed
from sglang_live.extensions.elastic.granules import Run

log = logging.getLogger(__name__)


class _StagedTokens(PagedTokenToKVPoolAllocator):
    """SGLang's allocator of single tokens, whose freed ones are a list as with larger pages.

    Upstream's copies all freed tokens whenever one more is added, so that adding memory to a large
    pool would take longer than to a small one.
    """

    free_pages: Tensor

    def alloc(self, need_size: int) -> Tensor | None:
        if need_size > len(self.free_pages):
            self.merge_and_sort_free()
        if need_size > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:need_size], self.free_pages[need_size:]
        return taken

    def free(self, free_index: Tensor) -> None:
        self.free_page_ids(free_index)  # none is freed twice, so upstream does not look for it


class ElasticPool:
    """
    Args:
        allocator: of a pool with elastic_memory, before its first use. Its size becomes that of
            the memory. One of single tokens changes its class, because others refer to it already.
    Raises:
        ValueError: the allocator is of another kind.
    """

    def __init__(self, allocator: BaseTokenToKVPoolAllocator):
        if type(allocator) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
            raise ValueError(f"elastic KV does not fit {type(allocator).__name__}")
        if type(allocator) is TokenToKVPoolAllocator:
            allocator.__class__ = _StagedTokens
            allocator.debug_mode = False
        assert isinstance(allocator, PagedTokenToKVPoolAllocator)
        self._allocator = allocator
        self.memory: ElasticMemory = allocator.get_kvcache().elastic_memory
        self._device = torch.device(allocator.device)
        self._page_size = allocator.page_size
        self._pages_per_unit = self.memory.geometry.unit_rows // self._page_size
        # Low pages are used first, and the list of free ones is sorted but for recent ones.
        allocator.need_sort = True
        self._units = self.memory.units  # in the allocator; the memory's own change in the thread
        self._tail_from: int | None = None  # first page of the tail that is drained
        # By page of the tail: not in the allocator.
        self._out = torch.zeros(0, dtype=torch.bool, device=self._device)
        self._n_out = 0
        self._receiving: Future[None] | None = None
        self._releasing: Future[Passed] | None = None
        self._thread = ThreadPoolExecutor(1, "kv memory", self.memory.store.use_in_thread)
        # Readable when the thread has finished: an idle scheduler waits for events.
        self.done_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._resize_s: list[float] = []
        self._clear = allocator.clear
        allocator.clear = self._clear_and_keep_out
        self._set_size()
        allocator.clear()

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the pages that the allocator has or has handed out."""
        return self.memory.geometry.tokens(self._units) - self._n_out * self._page_size

    @property
    def granules(self) -> int:
        return self._units * self.memory.geometry.granules + self.memory.n_spare

    @property
    def drains(self) -> bool:
        return self._tail_from is not None

    def take_resize_s(self) -> list[float]:
        """Times that resizes since the last call took of the scheduling thread."""
        taken, self._resize_s = self._resize_s, []
        return taken

    def free_away(self) -> None:
        """Free what the other engine had of this one's file, after its end."""
        self._thread.submit(self._free_away)

    def _free_away(self) -> None:
        try:
            self.memory.free_away()
        except OSError as error:
            log.error("kv_memory_not_freed error=%s", error)

    # --- growing ---

    def receive(self, runs: list[Run], files: list[int]) -> None:
        """Begin to map memory. mapped() tells when it can be used. The files are closed."""
        assert self._is_at_rest
        self._receiving = self._start(self.memory.receive, runs, files)

    def mapped(self) -> bool:
        """Whether the memory of receive() is in the pool now.

        Raises:
            OSError, ValueError: it could not be mapped; nothing has changed.
        """
        if self._receiving is None or not self._receiving.done():
            return False
        began_s = time.perf_counter()
        receiving, self._receiving = self._receiving, None
        receiving.result()
        first = self._units * self._pages_per_unit
        self._units = self.memory.units
        self._set_size()
        end = self._units * self._pages_per_unit
        self._add(torch.arange(first, end, device=self._device))
        self._resize_s.append(time.perf_counter() - began_s)
        return True

    # --- shrinking ---

    def begin_drain(self, granules: int) -> None:
        """Begin to empty the end of the pool, so that granules can be released."""
        assert self._is_at_rest
        left = max(1, self.memory.units_without(granules))
        self._tail_from = left * self._pages_per_unit
        n_pages = self._units * self._pages_per_unit - self._tail_from
        self._out = torch.zeros(n_pages, dtype=torch.bool, device=self._device)
        self._n_out = 0
        self.drain()

    def drain(self) -> int:
        """Take the tail's free pages out of the allocator. Returns how many of its tokens are in
        use.
        """
        assert self._tail_from is not None
        for page_ids in self._take_free(self._tail_from):
            self._out[page_ids - self._tail_from] = True
            self._n_out += len(page_ids)
        return (len(self._out) - self._n_out) * self._page_size

    def release(self, granules: int) -> "Future[Passed]":
        """End the drain and unmap what is out, at most `granules`; the rest stays.

        Returns the memory when it is unmapped; nothing if the last unit is in use.
        """
        assert self._tail_from is not None
        began_s = time.perf_counter()
        back = self._out[:0]
        units = self._tail_from // self._pages_per_unit
        if self._n_out < len(self._out):
            n_kept = int(torch.nonzero(~self._out)[-1]) + 1
            units = -(-(self._tail_from + n_kept) // self._pages_per_unit)
            first = units * self._pages_per_unit - self._tail_from
            back = torch.nonzero(self._out[:first])[:, 0] + self._tail_from
        n_units, self._units = self._units - units, units
        self._tail_from = None
        self._n_out = 0
        self._set_size()
        self._add(back)
        possible = n_units * self.memory.geometry.granules + self.memory.n_spare
        self._releasing = self._start(self.memory.release, min(granules, possible))
        self._resize_s.append(time.perf_counter() - began_s)
        return self._releasing

    def released(self) -> None:
        """To be called when the memory has been passed on: closes its files."""
        assert self._releasing is not None
        passed, self._releasing = self._releasing.result(), None
        for file in passed.files:
            os.close(file)

    @property
    def _is_at_rest(self) -> bool:
        return self._receiving is None and self._releasing is None and not self.drains

    def _start(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        started = self._thread.submit(work, *args)
        started.add_done_callback(lambda _: os.eventfd_write(self.done_event, 1))
        return started

    # --- SGLang's allocator ---

    def _set_size(self) -> None:
        size = self.memory.geometry.tokens(self._units)
        allocator = self._allocator
        allocator.size = allocator.get_kvcache().size = size
        allocator.num_pages = size // self._page_size

    def _add(self, page_ids: Tensor) -> None:
        if len(page_ids):
            self._allocator.staged_pages.append(page_ids)
            self._allocator.num_staged_pages += len(page_ids)

    def _take_free(self, first: int) -> list[Tensor]:
        """Remove the free pages from `first` on from the allocator's lists, and return them."""
        allocator = self._allocator
        at = int(torch.searchsorted(allocator.free_pages, first))
        taken = [allocator.free_pages[at:]]
        allocator.free_pages = allocator.free_pages[:at]
        if allocator.staged_pages:
            staged = torch.cat(allocator.staged_pages)
            is_tail = staged >= first
            taken.append(staged[is_tail])
            if len(taken[-1]):
                staged = staged[~is_tail]
            allocator.staged_pages = [staged]
            allocator.num_staged_pages = len(staged)
        return [pages for pages in taken if len(pages)]

    def _clear_and_keep_out(self) -> None:
        """In the place of the allocator's clear(), which makes all pages free."""
        self._clear()
        if self._tail_from is not None:
            self._out[:], self._n_out = False, 0
            self.drain()
