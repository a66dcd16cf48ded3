"""Bound on how much of the radix tree has not been used since a given time.

SGLang's tree evicts its least recently used leaves and does not tell their age. The tokens used
since some time bound how many were not. That suffices to rank the tree's leaves among idle
sessions, while the tree keeps its own order, in Rust.
Owner: one TreeAge per session cache. Deterministic: all times are arguments.
"""

from bisect import bisect_right

# Uses within this time count as one; no KV is ranked more finely.
_GRAIN_S = 0.1
_MAX_ENTRIES = 4096


class TreeAge:
    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._totals: list[int] = []  # tokens used up to and with each time

    def used(self, n_tokens: int, now_s: float) -> None:
        """Record that n_tokens of the tree were inserted or matched."""
        total = (self._totals[-1] if self._totals else 0) + n_tokens
        if self._times_s and now_s < self._times_s[-1] + _GRAIN_S:
            self._totals[-1] = total
            return
        self._times_s.append(now_s)
        self._totals.append(total)
        if len(self._times_s) > _MAX_ENTRIES:
            half = _MAX_ENTRIES // 2
            # For times before the remaining entries, the dropped uses count as later ones.
            del self._times_s[:half], self._totals[:half]

    def unused_since(self, at_s: float, n_evictable: int) -> int:
        """Returns how many of n_evictable tokens were certainly not used at or after at_s."""
        if not self._totals:
            return n_evictable
        first = bisect_right(self._times_s, at_s - _GRAIN_S)
        before = self._totals[first - 1] if first else 0
        return max(0, n_evictable - (self._totals[-1] - before))
