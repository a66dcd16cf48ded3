"""Order of eviction over idle session slots and radix-tree leaves together.

In: evictable keys, with their next use (kv/next_use.py) or their last one. Out: victims, the key
with the latest expected use first. LiveServe (arXiv 2606.22983) section 5.1.
Owner: one VictimIndex per engine rank. Deterministic: all times are arguments.

A key is ranked by the expected time until its use:
    known, in the future: the time until then.
    known, overdue: as long again as it is overdue. A user who has been silent for long beyond the
        estimate will likely stay silent (Lindy's law).
    unknown: as long again as it has been unused. Among unknown keys this is LRU.
Time changes all keys of a kind by the same amount, so none of the three orders changes by itself:
a victim is the largest of three tops, an update costs O(log n), and nothing scans.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from sglang_live.kv.lazy_heap import LazyHeap

_OUT = -1  # the seq of an entry that is in no heap


@dataclass(frozen=True, slots=True)
class Victim:
    """Tokens to evict from the tail of a key."""

    key: Hashable
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """The next victim.

    remaining_s: expected time until its use.
    """

    key: Hashable
    n_tokens: int
    remaining_s: float


@dataclass(slots=True, eq=False)
class _Entry:
    """
    at_s: next use if known, else last use.
    until_s: end of its protection; None: it has none.
    """

    key: Hashable
    n_tokens: int = 0
    whole: bool = False
    known: bool = False
    at_s: float = 0.0
    until_s: float | None = None
    seq: int = _OUT

    def remaining_s(self, now_s: float) -> float:
        return abs(self.at_s - now_s) if self.known else now_s - self.at_s


class _Order:
    """Three heaps whose tops are the candidates for the most time until its use."""

    def __init__(self) -> None:
        # Known keys are in two orders: one counts while they are in the future, one when overdue.
        self.latest: LazyHeap[_Entry] = LazyHeap()
        self.earliest: LazyHeap[_Entry] = LazyHeap()
        self.unused: LazyHeap[_Entry] = LazyHeap()

    def push(self, entry: _Entry) -> None:
        if entry.known:
            self.latest.push(-entry.at_s, entry)
            self.earliest.push(entry.at_s, entry)
        else:
            self.unused.push(entry.at_s, entry)

    def drop(self, entry: _Entry) -> None:
        """Count the removal of an entry, whose seq has changed."""
        if entry.known:
            self.latest.drop()
            self.earliest.drop()
        else:
            self.unused.drop()

    def top(
        self, now_s: float, later_than_s: float = -math.inf
    ) -> tuple[float, _Entry, LazyHeap[_Entry]] | None:
        """Returns remaining_s, entry and heap of the key with most time until its use."""
        best = None
        best_s = later_than_s - now_s
        for heap in (self.latest, self.earliest, self.unused):
            entry = heap.top()
            if entry is None:
                continue
            remaining_s = entry.remaining_s(now_s)
            first = best is not None and remaining_s == best_s and entry.seq < best[1].seq
            if remaining_s > best_s or first:
                best, best_s = (remaining_s, entry, heap), remaining_s
        return best


class VictimIndex:
    """
    Attributes:
        evictable_tokens: tokens of all keys without protection.
        protected_tokens: tokens of all keys with it. Expired protection counts here until the
            next peek(), victims() or later_tokens().
        picks_known, picks_lru: number of victims chosen by an estimate, and by LRU without one.
    """

    def __init__(self, page_size: int) -> None:
        """page_size: tokens of a page."""
        if page_size < 1:
            raise ValueError(f"page_size must be positive, got {page_size}")
        self.evictable_tokens = self.protected_tokens = 0
        self.picks_known = self.picks_lru = 0
        self._page_size = page_size
        self._entries: dict[Hashable, _Entry] = {}
        self._last_seq = 0
        # Protected keys have an order of their own, for when no others are left.
        self._free = _Order()
        self._kept = _Order()
        self._protected: LazyHeap[_Entry] = LazyHeap()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def n_tokens(self, key: Hashable) -> int:
        """Returns its evictable tokens, protected or not; 0: the key is not in the index."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.n_tokens

    def put(
        self,
        key: Hashable,
        *,
        n_tokens: int,
        last_use_s: float,
        next_use_s: float | None = None,
        whole: bool = False,
    ) -> None:
        """Insert or re-rank a key. Protection stays; among equals the key counts as the newest.

        Args:
            n_tokens: evictable tokens, the first at the start of a page; 0 removes the key.
            whole: it can be evicted only as a whole, as a leaf of the radix tree.
        Raises:
            ValueError: if n_tokens is negative, or the time to rank by is not finite.
        """
        at_s = last_use_s if next_use_s is None else next_use_s
        if n_tokens < 0 or not math.isfinite(at_s):
            raise ValueError(f"cannot rank {key}: {n_tokens} tokens at {at_s} s")
        if n_tokens == 0:
            self.remove(key)
            return
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key)
        else:
            self._leave(entry)
        entry.n_tokens = n_tokens
        entry.whole = whole
        entry.at_s = at_s
        entry.known = next_use_s is not None
        self._enter(entry)

    def remove(self, key: Hashable) -> None:
        """Remove a key and its protection. No effect if victims() has already taken all of it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._leave(entry)

    def shrink(self, key: Hashable, n_tokens: int) -> None:
        """Reduce a key to n_tokens; its rank stays.

        Raises:
            KeyError: if the key is not in the index.
            ValueError: if it has fewer, or n_tokens is negative.
        """
        entry = self._entries[key]
        if not 0 <= n_tokens <= entry.n_tokens:
            raise ValueError(f"cannot shrink {key} from {entry.n_tokens} to {n_tokens} tokens")
        if n_tokens == 0:
            self.remove(key)
            return
        self._count(entry, n_tokens - entry.n_tokens)
        entry.n_tokens = n_tokens

    def protect(self, key: Hashable, until_s: float) -> None:
        """Protect a key that will be used soon from eviction until until_s, which may be math.inf.

        A second call replaces the first, and may lengthen or shorten protection.

        Raises:
            KeyError: if the key is not in the index.
            ValueError: if until_s is not a number.
        """
        if math.isnan(until_s):
            raise ValueError(f"cannot protect {key} until {until_s}")
        self._set_protection(self._entries[key], until_s)

    def unprotect(self, key: Hashable) -> None:
        """End a key's protection. No effect if it has none."""
        entry = self._entries.get(key)
        if entry is not None and entry.until_s is not None:
            self._set_protection(entry, None)

    def peek(self, now_s: float) -> Candidate | None:
        """Returns the next victim without taking it; None: there is none."""
        self._expire(now_s)
        top = self._free.top(now_s)
        if top is None:
            return None
        remaining_s, entry, _ = top
        return Candidate(entry.key, entry.n_tokens, remaining_s)

    def victims(
        self,
        n_tokens: int,
        now_s: float,
        *,
        later_than_s: float = -math.inf,
        protected: bool = False,
    ) -> list[Victim]:
        """Take n_tokens, rounded up to whole pages, or to keys that are evicted as a whole.

        Args:
            later_than_s: only keys whose use is expected after this time are taken.
            protected: take from protected keys, and from no others; the rest of a key stays
                protected.
        Returns:
            Victims in the order of eviction, with fewer tokens if there are no more.
        """
        self._expire(now_s)
        found = []
        order = self._kept if protected else self._free
        while n_tokens > 0 and (top := order.top(now_s, later_than_s)) is not None:
            _, entry, _ = top
            self.picks_known += entry.known
            self.picks_lru += not entry.known
            kept = 0 if entry.whole else max(0, entry.n_tokens - n_tokens)
            kept -= kept % self._page_size
            found.append(Victim(entry.key, entry.n_tokens - kept))
            n_tokens -= entry.n_tokens - kept
            self.shrink(entry.key, kept)
        return found

    def later_tokens(self, now_s: float, later_than_s: float, enough_tokens: int) -> int:
        """Returns how many tokens victims() would take, at most enough_tokens."""
        self._expire(now_s)
        popped = []
        counted: set[int] = set()
        n_tokens = 0
        order = self._free
        while n_tokens < enough_tokens and (top := order.top(now_s, later_than_s)) is not None:
            _, entry, heap = top
            popped.append((heap, heap.pop()))
            if entry.seq not in counted:
                counted.add(entry.seq)
                n_tokens += entry.n_tokens
        for heap, entry_of_heap in popped:
            heap.restore(entry_of_heap)
        return min(n_tokens, enough_tokens)

    def _expire(self, now_s: float) -> None:
        while (entry := self._protected.top()) is not None:
            assert entry.until_s is not None, "an entry without protection in its heap"
            if entry.until_s > now_s:
                return
            self._set_protection(entry, None)

    def _set_protection(self, entry: _Entry, until_s: float | None) -> None:
        self._leave(entry)
        entry.until_s = until_s
        self._enter(entry)

    def _enter(self, entry: _Entry) -> None:
        self._last_seq += 1
        entry.seq = self._last_seq
        self._order_of(entry).push(entry)
        if entry.until_s is not None:
            self._protected.push(entry.until_s, entry)
        self._count(entry, entry.n_tokens)

    def _leave(self, entry: _Entry) -> None:
        entry.seq = _OUT
        self._order_of(entry).drop(entry)
        if entry.until_s is not None:
            self._protected.drop()
        self._count(entry, -entry.n_tokens)

    def _order_of(self, entry: _Entry) -> _Order:
        return self._free if entry.until_s is None else self._kept

    def _count(self, entry: _Entry, n_tokens: int) -> None:
        if entry.until_s is None:
            self.evictable_tokens += n_tokens
        else:
            self.protected_tokens += n_tokens
