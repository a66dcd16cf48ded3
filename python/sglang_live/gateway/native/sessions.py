"""How many sessions of SGLang's own API are open, by owner.

In: names opened, used and closed. Out: room, or an error. Owner: one NativeSessions per process.
Each holds a request row and KV in the engine until it is closed or was idle for its timeout.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_live.errors import CapacityError
from sglang_live.gateway.rate_limits import RateLimitError

IDLE_S = 3_600.0


@dataclass(slots=True)
class NativeSessions:
    """_open: (owner, name) -> (idle limit, time when it will have been idle for so long)."""

    per_owner: int
    of_all: int
    now_s: Callable[[], float]
    _open: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def open(self, owner: str, name: str, idle_s: float) -> None:
        """Raises RateLimitError or CapacityError when there is no room for one more."""
        now_s = self.now_s()
        self._open = {key: entry for key, entry in self._open.items() if entry[1] > now_s}
        n_own = sum(held == owner for held, _ in self._open)
        if (owner, name) not in self._open:
            if n_own >= self.per_owner:
                raise RateLimitError(f"This key has {n_own} sessions open, its limit: close one.")
            if len(self._open) >= self.of_all:
                raise CapacityError(f"full: {self.of_all} native sessions", retry_after_s=10)
        self._open[owner, name] = idle_s, now_s + idle_s

    def used(self, owner: str, name: str) -> None:
        if entry := self._open.get((owner, name)):
            self._open[owner, name] = entry[0], self.now_s() + entry[0]

    def close(self, owner: str, name: str) -> None:
        self._open.pop((owner, name), None)
