"""Limits on sessions and responses of a key, and on out-of-band responses at one time.

In: responses that are about to start. Out: the limit's status, or RateLimitError.
Owner: one RateLimits per process; sessions and HTTP requests of a key count together.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sglang_live.clock import Clock
from sglang_live.errors import LiveError
from sglang_live.settings import Count, Seconds, Settings, flag

_WINDOW_S = 60.0
# One response every two seconds; the turns of a conversation take at least five.
_RESPONSES_PER_MINUTE_OF_A_SESSION = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits(Settings):
    """What one client may take. None: no limit."""

    max_sessions_per_key: Count | None = flag(
        None,
        "sessions of one key and its client secrets at once",
        unset="with several keys three quarters, else all",
    )
    max_sessions_per_secret: Count = flag(4, "sessions of one client secret at once")
    max_responses_per_minute: Count | None = flag(
        None,
        "responses of one key and its client secrets",
        unset="with keys 30 per session of the key, else no limit",
    )
    idle_session_s: Seconds = flag(
        1800.0,
        "close a session whose client sends nothing, not even audio, for this time; 0: never",
    )
    resume_s: Seconds = flag(
        30.0,
        "keep a resumable session whose socket is lost for this time; 0: none is resumable",
    )

    def of_server(self, max_sessions: int, n_keys: int) -> "ClientLimits":
        """With the defaults that depend on the server's sessions and keys.

        Several keys get three quarters of the sessions each. The number of responses is above the
        need of conversations and below that of a runaway loop.
        """
        sessions, responses = self.max_sessions_per_key, self.max_responses_per_minute
        if sessions is None and n_keys > 1:
            sessions = max(1, max_sessions * 3 // 4)
        if responses is None and n_keys:
            responses = _RESPONSES_PER_MINUTE_OF_A_SESSION * (sessions or max_sessions)
        return replace(self, max_sessions_per_key=sessions, max_responses_per_minute=responses)


class RateLimitError(LiveError):
    code = "rate_limit_exceeded"
    http_status = 429


class TooManySessionsError(RateLimitError):
    """One key, or one client secret, has its limit of sessions open."""


class OpenSessions:
    """Sessions by key, and by client secret.

    Owner: one OpenSessions per process; the sessions of all protocols count together.
    """

    def __init__(self, limits: ClientLimits):
        self._limits = limits
        self._open: Counter[str] = Counter()

    def check_room(self, owner: str, secret: str | None = None) -> None:
        """Raises TooManySessionsError."""
        limit = self._limits.max_sessions_per_key
        if limit is not None and self._open[owner] >= limit:
            raise TooManySessionsError(f"This key has {limit} sessions open, its limit.")
        most = self._limits.max_sessions_per_secret
        if secret is not None and self._open[secret] >= most:
            raise TooManySessionsError(f"This client secret has {most} sessions open, its limit.")

    @contextmanager
    def one(self, *holders: str) -> Iterator[None]:
        """Count a session while it is open. holders: the key's owner, then its client secret."""
        self._open.update(holders)
        try:
            yield
        finally:
            self._open.subtract(holders)
            self._open += Counter()  # removes counts of zero


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """
    limit: responses per minute.
    remaining: responses that may start now.
    reset_s: seconds until `remaining` equals `limit` again.
    """

    limit: int
    remaining: int
    reset_s: float

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "requests",
                "limit": self.limit,
                "remaining": self.remaining,
                "reset_seconds": round(self.reset_s, 3),
            }
        ]


class RateLimits:
    """per_minute: responses of one key; None: no limit."""

    def __init__(self, per_minute: int | None, clock: Clock):
        self._limit = per_minute
        self._clock = clock
        self._started: defaultdict[str, deque[float]] = defaultdict(deque)

    def take(self, owner: str, n_responses: int = 1) -> RateLimitStatus | None:
        """Count n_responses more of this owner.

        Returns:
            The status after them; None without a limit.
        Raises:
            RateLimitError: the last minute has no room for them; they are not counted.
        """
        if self._limit is None:
            return None
        now_s, started = self._clock.now_s(), self._started[owner]
        while started and started[0] <= now_s - _WINDOW_S:
            started.popleft()
        if len(started) + n_responses > self._limit:
            wait_s = started[0] + _WINDOW_S - now_s if started else _WINDOW_S
            raise RateLimitError(
                f"This key may start {self._limit} responses per minute: wait {wait_s:.1f} s.",
                retry_after_s=wait_s,
            )
        started.extend([now_s] * n_responses)
        remaining = self._limit - len(started)
        return RateLimitStatus(self._limit, remaining, started[-1] + _WINDOW_S - now_s)


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
