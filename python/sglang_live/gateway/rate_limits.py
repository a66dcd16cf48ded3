"""Limits on sessions and responses of a key, and on out-of-band responses at one time.

In: responses that are about to start. Out: the limit's status, or RateLimitError.
Owner: one RateLimits per process; sessions and HTTP requests of a key count together. With
--shared-limits those of all gateways do (shared_limits.py).
"""

from collections import Counter, defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any

from sglang_live.clock import Clock
from sglang_live.errors import LiveError
from sglang_live.settings import Check, Count, Seconds, Settings, flag

WINDOW_S = 60.0
_Url = Annotated[
    str,
    Check("a URL valkey://… or valkeys://…", lambda v: v.startswith(("valkey://", "valkeys://"))),
]
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
    shared_limits: _Url | None = flag(
        None,
        "store of the Valkey or Redis protocol in which all gateways of a fleet count the "
        "sessions, responses and client secrets of a key together",
        value="valkey(s)://…",
        env="SGLANG_LIVE_SHARED_LIMITS",
    )
    gateways: Count = flag(
        1,
        "gateways of the fleet: without --shared-limits, or while its store is gone, each grants "
        "this part of the limits of a key",
    )

    def of_server(self, max_sessions: int, n_keys: int) -> "ClientLimits":
        """With the defaults that depend on the server's sessions and keys.

        Several keys get three quarters of the sessions each. The number of responses is above the
        need of conversations and below that of a runaway loop.
        """
        sessions, responses = self.max_sessions_per_key, self.max_responses_per_minute
        max_sessions *= self.gateways
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

    Attributes:
        n_gateways: that have the same limits and do not know of each other's sessions.
    """

    def __init__(self, limits: ClientLimits):
        self._limits = limits
        self.n_gateways = limits.gateways
        self._open: Counter[str] = Counter()

    async def open(self, owner: str, secret: str | None = None) -> ExitStack:
        """Count a session until what this returns is closed.

        Raises:
            TooManySessionsError: there is no room for one more.
        """
        holders = self._holders(owner, secret)
        for at, (holder, limit) in enumerate(holders.items()):
            if limit is not None and self._open[holder] >= share(limit, self.n_gateways):
                raise self._too_many(at)
        return self._count(*holders)

    def _holders(self, owner: str, secret: str | None) -> dict[str, int | None]:
        """The limit of each."""
        holders = {owner: self._limits.max_sessions_per_key}
        if secret is not None:
            holders[secret] = self._limits.max_sessions_per_secret
        return holders

    def _too_many(self, at: int) -> TooManySessionsError:
        """at: 0 for the key, 1 for the client secret."""
        what = ("key", "client secret")[at]
        limits = self._limits.max_sessions_per_key, self._limits.max_sessions_per_secret
        return TooManySessionsError(f"This {what} has {limits[at]} sessions open, its limit.")

    def _count(self, *holders: str) -> ExitStack:
        self._open.update(holders)
        counted = ExitStack()
        counted.callback(self._uncount, holders)
        return counted

    def _uncount(self, holders: tuple[str, ...]) -> None:
        self._open.subtract(holders)
        self._open += Counter()  # removes counts of zero


def share(limit: int, n_gateways: int) -> int:
    """The part of a limit that each of several gateways may grant."""
    return max(1, limit // n_gateways)


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
    """per_minute: responses of one key; None: no limit. n_gateways: see OpenSessions."""

    def __init__(self, per_minute: int | None, clock: Clock, n_gateways: int = 1):
        self._limit = per_minute
        self._clock = clock
        self.n_gateways = n_gateways
        self._started: defaultdict[str, deque[float]] = defaultdict(deque)

    async def take(self, owner: str, n_responses: int = 1) -> RateLimitStatus | None:
        """Count n_responses more of this owner.

        Returns:
            The status after them; None without a limit.
        Raises:
            RateLimitError: the last minute has no room for them; they are not counted.
        """
        return self.take_now(owner, n_responses)

    def take_now(self, owner: str, n_responses: int = 1) -> RateLimitStatus | None:
        """The same for a turn, which waits for nothing."""
        if self._limit is None:
            return None
        return self._take(owner, n_responses, share(self._limit, self.n_gateways))

    def _take(self, owner: str, n_responses: int, limit: int) -> RateLimitStatus:
        """limit: of this gateway."""
        now_s, started = self._clock.now_s(), self._recent(owner)
        if len(started) + n_responses > limit:
            raise self._too_many(started[0] + WINDOW_S - now_s if started else WINDOW_S)
        started.extend([now_s] * n_responses)
        return RateLimitStatus(limit, limit - len(started), WINDOW_S)

    def _recent(self, owner: str) -> deque[float]:
        now_s, started = self._clock.now_s(), self._started[owner]
        while started and started[0] <= now_s - WINDOW_S:
            started.popleft()
        return started

    def _too_many(self, wait_s: float) -> RateLimitError:
        return RateLimitError(
            f"This key may start {self._limit} responses per minute: wait {wait_s:.1f} s.",
            retry_after_s=wait_s,
        )


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
