"""A heap that items may leave from anywhere.

What has left stays behind as a stale entry, until it comes to the top or until stale entries
outnumber live ones and the heap is built anew. So every change costs O(log n), amortised: the one
in n that builds anew takes about a microsecond per item.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

# Below this many entries building anew is not worth its call.
_FEW_ENTRIES = 64


class Numbered(Protocol):
    """seq: changes each time the item enters or leaves, and is never used for another one."""

    seq: int


Item = TypeVar("Item", bound=Numbered)
Entry = tuple[float, int, Item]


class LazyHeap(Generic[Item]):
    """Smallest value first, then smallest seq."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._n_live = 0

    def push(self, value: float, item: Item) -> None:
        self.sliced_prefill((value, item.seq, item))

    def sliced_prefill(self, entry: Entry) -> None:
        """Undo a pop."""
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

    def pop(self) -> Entry:
        """The entry of top(), which must have been called before and not have been None."""
        self._n_live -= 1
        return heappop(self._entries)

    def drop(self) -> None:
        """One item has left: its seq has changed."""
        self._n_live -= 1
        if len(self._entries) > 2 * self._n_live + _FEW_ENTRIES:
            self._entries = [entry for entry in self._entries if entry[2].seq == entry[1]]
            heapify(self._entries)
