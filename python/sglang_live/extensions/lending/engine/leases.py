"""The lender's side of leases: runs of its own pages, from its allocator and back.

In: the state of its pool each round, the borrower's answers. Out: leases in the shared table.
Data moves without the lender: the borrower alone reads and writes leased pages. The lender frees
them when the borrower says that it has left, or when its process has ended, which the kernel tells.
All ranks take and free the same pages in the same round, by the facts of rank 0 (lease_facts.py).
Owner: one Leases per scheduler that lends.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_live.extensions.lending.channel import Bell, Member
from sglang_live.extensions.lending.engine.lease_facts import LenderFacts
from sglang_live.extensions.lending.engine.shared_memory import Launched
from sglang_live.extensions.lending.layout import Geometry, Memory
from sglang_live.extensions.lending.link import LenderLink
from sglang_live.extensions.lending.policy import (
    LenderView,
    LendingConfig,
    Need,
    offer,
    reclaim,
    run_tokens,
)

logger = logging.getLogger(__name__)

# Pages are overwritten with zeros when they are offered and when they return. This many take a CPU
# some milliseconds, less than a round.
_WIPE_BYTES_PER_ROUND = 1 << 26
_N_LATENCIES = 1024
# A borrower that has not answered a recall for this long may have stopped.
_ANSWERED_S = 0.2
# A search for contiguous pages reads all free ones: in a fragmented pool not every round.
_SEARCH_AGAIN_S = 1.0
# With overlap the step in flight may write to pages that a finished request has freed. Its result
# is there in the round after the next at the latest.
_ROUNDS_IN_FLIGHT = 2


@dataclass(slots=True)
class Run:
    """Slots [first, first + n_slots) of a lease.

    Attributes:
        recalled_s: when it was recalled; None: it is not.
    """

    first: int
    n_slots: int
    recalled_s: float | None = None


@dataclass(slots=True)
class _Taken:
    """A run that has left the allocator, and is offered after some rounds.

    Attributes:
        wiped: the device's work, when zeros have been written.
    """

    first: int
    rounds_left: int = _ROUNDS_IN_FLIGHT
    wiped: Launched | None = None


class PoolRuns:
    """Takes runs of contiguous pages out of SGLang's allocator, and returns them.

    Attributes:
        tokens: of all runs that are out.
    """

    def __init__(self, allocator: Any):
        self._allocator = allocator
        self._page = allocator.page_size
        self._out: dict[int, int] = {}  # first page: number of pages
        self._clear = allocator.clear
        allocator.clear = self.clear

    @property
    def tokens(self) -> int:
        return self._page * sum(self._out.values())

    def take(self, n_tokens: int) -> int | None:
        """Returns the first slot of the highest run of free pages; None if there is none."""
        n_pages = n_tokens // self._page
        if self._allocator.need_sort:
            self._allocator.merge_and_sort_free()
        free = self._allocator.free_pages.cpu().numpy()
        if n_pages < 1 or len(free) < n_pages:
            return None
        # A map of all pages, not a sort: this is in a round, and a pool has millions of slots.
        is_free = np.zeros(self._allocator.size // self._page + 3, np.int8)
        is_free[free] = 1
        edges = np.diff(is_free)
        begins, ends = np.flatnonzero(edges == 1) + 1, np.flatnonzero(edges == -1) + 1
        long_enough = np.flatnonzero(ends - begins >= n_pages)
        if not len(long_enough):
            return None
        page = int(ends[long_enough[-1]]) - n_pages
        self._out[page] = n_pages
        self._withhold(page, n_pages)
        return page * self._page

    def put(self, first: int) -> None:
        page = first // self._page
        n_pages = self._out.pop(page)
        device = self._allocator.free_pages.device
        self._allocator.free_page_ids(torch.arange(page, page + n_pages, device=device))

    def clear(self) -> None:
        """In the place of the allocator's: a flush of the lender's cache does not free leases."""
        self._clear()
        for page, n_pages in self._out.items():
            self._withhold(page, n_pages)

    def _withhold(self, page: int, n_pages: int) -> None:
        free = self._allocator.free_pages
        self._allocator.free_pages = free[(free < page) | (free >= page + n_pages)]


class Leases:
    """
    Args:
        kv: SGLang's KV pool, whose buffers memory describes.
        shared: the memory's file, and where the buffers are in it.
    """

    def __init__(
        self,
        allocator: Any,
        tree_cache: Any,
        geometry: Geometry,
        shared: tuple[int, Memory],
        member: Member,
        config: LendingConfig | None = None,
    ):
        self._allocator = allocator
        self._tree = tree_cache
        self._config = config or LendingConfig()
        self._kv = allocator.get_kvcache()
        self._bytes_per_token = geometry.envelope_bytes
        self.run_tokens = run_tokens(
            allocator.size, self._bytes_per_token, allocator.page_size, self._config
        )
        self._runs = PoolRuns(allocator)
        self._rows = dict[int, Run]()
        self._need = Need(self._config)
        self._taken: _Taken | None = None
        self._recalled_at_s = self._search_at_s = -float("inf")
        self._latencies_s: deque[float] = deque(maxlen=_N_LATENCIES)
        self._longest_prompt = 0
        self.counts = dict.fromkeys(
            ("leases_offered", "leases_recalled", "leases_returned", "borrowers_lost"), 0.0
        )
        self._link = LenderLink(member, *shared)
        self._member = member
        self._told: LenderFacts | None = None
        self._has_asked = False
        self._now_s = 0.0

    @property
    def bell(self) -> Bell:
        return self._link.bell

    @property
    def tokens(self) -> int:
        """Tokens of the pool that are not the lender's now."""
        return self._runs.tokens

    @property
    def returns_soon(self) -> bool:
        """Whether pages can be recalled, and the borrower has answered all earlier recalls."""
        recalled_s = [run.recalled_s for run in self._rows.values() if run.recalled_s is not None]
        if recalled_s:
            now_s = time.monotonic() if self._is_alone else self._now_s
            return now_s - min(recalled_s) < _ANSWERED_S
        return bool(self._rows)

    def queued(self, n_tokens: int) -> None:
        """To be called with the length of each prompt."""
        self._longest_prompt = max(self._longest_prompt, n_tokens)

    # --- several ranks ---

    @property
    def _is_alone(self) -> bool:
        return self._member.n_ranks == 1

    def facts_to_tell(self) -> LenderFacts | None:
        """On rank 0, once a round: what all ranks are to be told in it, if there are several."""
        if self._is_alone or self._has_asked:
            return None
        self._has_asked = True  # until they have acted on it
        return self._facts()

    def told(self, facts: LenderFacts) -> None:
        """On all ranks, before step()."""
        self._told = facts

    def _facts(self) -> LenderFacts:
        now_s, link = time.monotonic(), self._link
        link.receive(now_s)
        return LenderFacts(
            now_s=now_s,
            begins=link.can_begin,
            is_lost=link.is_lost,
            left=tuple(link.table.left(list(self._rows))),
            used={} if self._is_alone else {row: link.table.used(row) for row in self._rows},
        )

    # --- a round ---

    def step(self, n_decoding: int, missing: int) -> None:
        """To be called once a round.

        Args:
            n_decoding: requests that take a slot per round.
            missing: tokens that a waiting request found too few.
        """
        if self._member.rank > 0:
            self._link.receive(time.monotonic())
        facts = self._facts() if self._is_alone else self._told
        if facts is not None:
            self._told = None
            self._has_asked = False
            self._step(facts, n_decoding, missing)

    def _step(self, facts: LenderFacts, n_decoding: int, missing: int) -> None:
        self._now_s = now_s = facts.now_s
        view = self._view(now_s, n_decoding, missing)
        if facts.begins:
            self._link.begin()
        if self._link.partner is None:
            return
        if facts.is_lost:
            self._lose_borrower()
            return
        self._take_returned(facts)
        n_recalled = reclaim(view, self.run_tokens, self._config)
        if n_recalled:
            self._put_taken()
            self._recall(n_recalled, facts)
        elif self._taken is not None:
            self._offer_taken(self._taken)
        elif now_s >= self._search_at_s and offer(view, self.run_tokens, self._config):
            self._take(view, now_s)

    def _view(self, now_s: float, n_decoding: int, missing: int) -> LenderView:
        free, evictable = self._allocator.available_size(), self._tree.evictable_size()
        held = self._allocator.size - free - evictable - self._runs.tokens
        self._need.observe(now_s, held, self._longest_prompt)
        self._longest_prompt = 0
        recalled = (run.n_slots for run in self._rows.values() if run.recalled_s is not None)
        return LenderView(
            total=self._allocator.size,
            free=free,
            evictable=evictable,
            leased=self._runs.tokens,
            recalled=sum(recalled),
            needed=self._need.held,
            longest_prompt=self._need.prompt,
            decoding=n_decoding,
            missing=missing,
            since_recall_s=now_s - self._recalled_at_s,
        )

    # --- the borrower ---

    def _lose_borrower(self) -> None:
        """Free what a borrower that has ended had leased; when all is free, meet another."""
        for row in list(self._rows)[: self._rows_per_round]:
            self._free(row)
        if self._rows:
            self.bell.ring()
            return
        self._put_taken()
        self.counts["borrowers_lost"] += 1
        self._link.part()

    # --- leases ---

    @property
    def _rows_per_round(self) -> int:
        return max(1, _WIPE_BYTES_PER_ROUND // max(1, self.run_tokens * self._bytes_per_token))

    def _take_returned(self, facts: LenderFacts) -> None:
        for row in facts.left[: self._rows_per_round]:
            recalled_s = self._rows[row].recalled_s
            if recalled_s is not None:
                self._latencies_s.append(facts.now_s - recalled_s)
            self._free(row)
            self.counts["leases_returned"] += 1
        if len(facts.left) > self._rows_per_round:
            self.bell.ring()

    def _free(self, row: int) -> None:
        run = self._rows.pop(row)
        # Attention reads rows behind the end of a sequence: they must be numbers, and no session's.
        self._wipe(run)
        self._link.table.release(row)
        self._runs.put(run.first)

    def _wipe(self, run: Run) -> None:
        for buffer in (*self._kv.k_buffer, *self._kv.v_buffer):
            buffer[run.first : run.first + run.n_slots].zero_()

    def _recall(self, n_runs: int, facts: LenderFacts) -> None:
        """Recall the leases that have the least in them."""
        now_s = facts.now_s
        kept = [row for row, run in self._rows.items() if run.recalled_s is None]
        used = self._link.table.used if self._is_alone else facts.used.__getitem__
        for row in sorted(kept, key=used)[:n_runs]:
            self._rows[row].recalled_s = now_s
            self._link.table.recall(row, time.monotonic_ns())
            self.counts["leases_recalled"] += 1
        self._recalled_at_s = now_s
        logger.info("leases_recalled n=%d kept=%d", n_runs, max(0, len(kept) - n_runs))
        self._ring()

    def _take(self, view: LenderView, now_s: float) -> None:
        if (missing := self.run_tokens - view.free) > 0:
            self._tree.evict(EvictParams(num_tokens=missing))
        first = self._runs.take(self.run_tokens)
        if first is None:
            self._search_at_s = now_s + _SEARCH_AGAIN_S
            return
        self._taken = _Taken(first)
        self.bell.ring()  # the next round comes, also if nothing else happens

    def _offer_taken(self, taken: _Taken) -> None:
        taken.rounds_left -= 1
        self.bell.ring()
        if taken.rounds_left > 0:
            return
        run = Run(taken.first, self.run_tokens)
        if taken.wiped is None:
            self._wipe(run)
            taken.wiped = Launched(self._kv.k_buffer[0].device)
            if taken.wiped.is_asynchronous:
                return
        # The borrower's writes are on a stream of another process. After a round there is hardly
        # anything to wait for, and all ranks offer in the same round.
        taken.wiped.synchronize()
        self._taken = None
        row = self._link.table.offer(run.first, run.n_slots)
        if row is None:
            self._runs.put(run.first)
            return
        self._rows[row] = run
        self.counts["leases_offered"] += 1
        self._ring()

    def _put_taken(self) -> None:
        if self._taken is not None:
            self._runs.put(self._taken.first)
            self._taken = None

    def _ring(self) -> None:
        assert self._link.partner is not None
        self._link.partner.bell.ring()

    def report(self) -> dict[str, float]:
        rows, table = self._rows.items(), self._link.table
        recalled = [row for row, run in rows if run.recalled_s is not None]
        active = [row for row, run in rows if run.recalled_s is None and table.is_active(row)]
        latencies_ms = 1000 * np.array(self._latencies_s or [0.0])
        return {
            **self.counts,
            "tokens_lent": float(self.tokens),
            "leases_state_offered": float(len(rows) - len(recalled) - len(active)),
            "leases_state_active": float(len(active)),
            "leases_state_recalled": float(len(recalled)),
            "recall_ms_p50": float(np.percentile(latencies_ms, 50)),
            "recall_ms_p99": float(np.percentile(latencies_ms, 99)),
            "recall_ms_max": float(latencies_ms.max()),
        }
