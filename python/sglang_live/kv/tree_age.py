"""How much of the radix tree was not used for how long, without looking into it.

SGLang's tree evicts its least recently used leaves and tells nobody how old they are. But whoever
knows what was used since a moment knows how much cannot have been. That is enough to rank the
tree's leaves with idle sessions, and the tree may keep its own order, in Rust.
Owner: one TreeAge per session cache. Same calls, same answers: all times are arguments.
"""

from bisect import bisect_right

# Uses within this time count as one; nobody's KV is ranked finer.
_GRAIN_S = 0.1
_MAX_ENTRIES = 4096


class TreeAge:
    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._totals: list[int] = []  # tokens used up to and with each time

    def used(self, n_tokens: int, now_s: float) -> None:
        """So many tokens of the tree were inserted, or found."""
        total = (self._totals[-1] if self._totals else 0) + n_tokens
        if self._times_s and now_s < self._times_s[-1] + _GRAIN_S:
            self._totals[-1] = total
            return
        self._times_s.append(now_s)
        self._totals.append(total)
        if len(self._times_s) > _MAX_ENTRIES:
            half = _MAX_ENTRIES // 2
            # For moments before what is left, what is forgotten counts as used since.
            del self._times_s[:half], self._totals[:half]

    def unused_since(self, at_s: float, n_evictable: int) -> int:
        """Of n_evictable tokens, how many were certainly not used at or after at_s."""
        if not self._totals:
            return n_evictable
        first = bisect_right(self._times_s, at_s - _GRAIN_S)
        before = self._totals[first - 1] if first else 0
        return max(0, n_evictable - (self._totals[-1] - before))
