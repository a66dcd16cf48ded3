"""How many answers a key may ask for in a minute.

In: an owner's wish for one more. Out: how much is left, or RateLimitError.
Owner: one RateLimits per process; calls and HTTP requests of a key count together.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from sglang_live.clock import Clock
from sglang_live.errors import LiveError

_WINDOW_S = 60.0


class RateLimitError(LiveError):
    code = "rate_limit_exceeded"
    http_status = 429


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """limit and remaining: answers a minute. reset_s: until all of them are free again."""

    limit: int
    remaining: int
    reset_s: float

    def to_json(self) -> list[dict]:
        return [
            {
                "name": "requests",
                "limit": self.limit,
                "remaining": self.remaining,
                "reset_seconds": round(self.reset_s, 3),
            }
        ]


class RateLimits:
    """per_minute: None: as many as they like."""

    def __init__(self, per_minute: int | None, clock: Clock):
        self._limit, self._clock = per_minute, clock
        self._asked: defaultdict[str, deque[float]] = defaultdict(deque)

    def take(self, owner: str, n_answers: int = 1) -> RateLimitStatus | None:
        """Count so many more answers of this owner.

        Returns: None without a limit.
        Raises:
            RateLimitError: there were as many in the last minute; this one is not counted.
        """
        if self._limit is None:
            return None
        now_s, asked = self._clock.now_s(), self._asked[owner]
        while asked and asked[0] <= now_s - _WINDOW_S:
            asked.popleft()
        if len(asked) + n_answers > self._limit:
            wait_s = asked[0] + _WINDOW_S - now_s if asked else _WINDOW_S
            raise RateLimitError(
                f"This key may ask for {self._limit} answers a minute: wait {wait_s:.1f} s.",
                retry_after_s=wait_s,
            )
        asked.extend([now_s] * n_answers)
        return RateLimitStatus(self._limit, self._limit - len(asked), asked[-1] + _WINDOW_S - now_s)


@dataclass(slots=True)
class OutOfBandSlots:
    """Out-of-band responses of all sessions that run at the same time.

    Owner: one OutOfBandSlots per process. The stages have room for `limit` responses beyond one
    per session: without a limit, out-of-band responses of one client would delay those of others.
    """

    limit: int
    n_taken: int = 0

    @property
    def full(self) -> bool:
        return self.n_taken >= self.limit

    def take(self) -> None:
        self.n_taken += 1

    def release(self) -> None:
        self.n_taken -= 1
