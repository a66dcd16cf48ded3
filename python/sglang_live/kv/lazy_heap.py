"""A heap of which any item can be removed.

A removed item leaves a stale entry, until that reaches the top, or until stale entries outnumber
live ones and the heap is rebuilt. So each change costs O(log n), amortised: a rebuild takes about a
microsecond per item, once in n changes.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

# With fewer stale entries a rebuild costs more than it saves.
_FEW_ENTRIES = 64


class Numbered(Protocol):
    """seq: changes each time the item is pushed or removed, and is never used for another item."""

    seq: int


Item = TypeVar("Item", bound=Numbered)
Entry = tuple[float, int, Item]


class LazyHeap(Generic[Item]):
    """A heap with the smallest value first, then the smallest seq."""

    def __init__(self) -> None:
        self._entries: list[Entry[Item]] = []
        self._n_live = 0

    def push(self, value: float, item: Item) -> None:
        self.restore((value, item.seq, item))

    def restore(self, entry: Entry[Item]) -> None:
        """Undo pop()."""
        heappush(self._entries, entry)
        self._n_live += 1

    def top(self) -> Item | None:
        entries = self._entries
        while entries:
            _, seq, item = entries[0]
            if item.seq == seq:
                return item
            heappop(entries)
        return None

    def pop(self) -> Entry[Item]:
        """Remove and return the entry of top(), which has just been called and was not None."""
        self._n_live -= 1
        return heappop(self._entries)

    def drop(self) -> None:
        """Count the removal of one item, whose seq has changed."""
        self._n_live -= 1
        if len(self._entries) > 2 * self._n_live + _FEW_ENTRIES:
            self._entries = [entry for entry in self._entries if entry[2].seq == entry[1]]
            heapify(self._entries)
