"""Limits of keys, and client secrets, that all gateways of a fleet have in common.

In: what is about to start here. Out: room for it, by what runs at all gateways. They meet in a
store of the Valkey protocol: sessions are leases in sorted sets, the responses of a minute another
one, each changed by one script, so that no two gateways grant the same room. It holds digests of
keys and secrets, no key and no secret.
A turn does not wait for the store: it is counted behind its start, so that turns which start at
several gateways within one exchange may exceed the limit by their number. While the store does not
answer each gateway grants its part of the limits, as without one.
Owner: one SharedLimits per gateway. Imported with --shared-limits alone.
"""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from prometheus_client import Counter, Gauge
from valkey.asyncio import Valkey
from valkey.exceptions import ValkeyError

from sglang_live.aio import background, end, lasting
from sglang_live.capacity.scaling import GatewayLoad, StageLoad
from sglang_live.errors import CapacityError, LiveError
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.parts import GatewayAddition, GatewayParts
from sglang_live.gateway.rate_limits import (
    WINDOW_S,
    OpenSessions,
    RateLimits,
    RateLimitStatus,
)
from sglang_live.gateway.realtime.client_secrets import MAX_OF_OWNER, ClientSecret
from sglang_live.gateway.realtime.events import SessionForm
from sglang_live.ids import new_id
from sglang_live.journal.valkey import connect

log = logging.getLogger(__name__)

_PREFIX = "sglang_live:limits:"
_GATEWAYS = _PREFIX + "gateways"
# A gateway that has died frees its sessions after the lease.
LEASE_S, RENEW_S = 10.0, 2.5
# The store answers within a millisecond; a handshake waits for a sick one no longer than this.
_PATIENCE_S = 0.5
_RATE_S = 60.0  # over which arrivals are counted
# Shares beyond it, up to infinity, are as bad.
_MOST_SHARE = 1000.0

# Times are the store's, in milliseconds: clocks of gateways differ.
_NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""
# KEYS: of holders. ARGV: the session, its lease, the limit of each holder, -1 for none.
# Returns 0, or the number of the first holder that has no room.
_OPEN = (
    _NOW
    + """
for i, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  local limit = tonumber(ARGV[2 + i])
  if limit >= 0 and redis.call('ZCARD', key) >= limit then return i end
end
for _, key in ipairs(KEYS) do
  redis.call('ZADD', key, now + ARGV[2], ARGV[1])
  redis.call('PEXPIRE', key, ARGV[2])
end
return 0
"""
)
# KEYS: of holders. ARGV: the session.
_CLOSE = "for _, key in ipairs(KEYS) do redis.call('ZREM', key, ARGV[1]) end"
# KEYS: gateways, report of this one, then a holder for each of its sessions. ARGV: this gateway,
# the lease, its report, then the sessions. Returns whether the store knew it, and how many there
# are.
_RENEW = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local known = redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[2])
for i = 3, #KEYS do
  redis.call('ZADD', KEYS[i], now + ARGV[2], ARGV[i + 1])
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
return {known and 1 or 0, redis.call('ZCARD', KEYS[1])}
"""
)
# KEYS: gateways. ARGV: beginning of a report's name. Returns the reports.
_REPORTS = (
    _NOW
    + """
local found = {}
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')) do
  local report = redis.call('GET', ARGV[1] .. gateway)
  if report then found[#found + 1] = report end
end
return found
"""
)
# KEYS: responses of a key. ARGV: name of these, their number, the limit, whether they have started,
# the window. Returns whether they count, how many there are then, and when the oldest leaves.
_TAKE = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[5])
local n, asked = redis.call('ZCARD', KEYS[1]), tonumber(ARGV[2])
local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local wait = oldest[2] and oldest[2] + ARGV[5] - now or ARGV[5]
if ARGV[4] == '0' and n + asked > tonumber(ARGV[3]) then return {0, n, wait} end
for i = 1, asked do redis.call('ZADD', KEYS[1], now, ARGV[1] .. '.' .. i) end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {1, n + asked, wait}
"""
)
# KEYS: a secret, those of its owner. ARGV: what it holds, its time to live, the most of an owner.
# Returns whether there was room.
_KEEP = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if not redis.call('ZSCORE', KEYS[2], KEYS[1])
  and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[2], KEYS[1])
redis.call('PEXPIREAT', KEYS[2], redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2])
return 1
"""
)


class StoreLostError(LiveError):
    """The store of the shared limits does not answer."""

    code = "shared_limits_unavailable"
    http_status = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReport:
    """What a gateway says of itself. n_more: see Capacity. stages: by name."""

    load: GatewayLoad
    n_more: int
    stages: Mapping[str, StageLoad]


_reports = msgspec.json.Decoder(GatewayReport)


async def read_reports(client: Valkey) -> list[GatewayReport]:
    """Of the gateways that live, for capacity/scaling.py."""
    found = await client.eval(_REPORTS, 1, _GATEWAYS, _PREFIX + "report:")  # type: ignore[misc]
    return [_reports.decode(one) for one in found]


def slowest(reports: Iterable[GatewayReport]) -> dict[str, StageLoad]:
    """Of each stage, the largest figures of any gateway."""
    found: dict[str, StageLoad] = {}
    for stage, load in (one for report in reports for one in report.stages.items()):
        known = found.get(stage, load)
        found[stage] = StageLoad(
            p90_s=_largest(known.p90_s, load.p90_s),
            pool_share=_largest(known.pool_share, load.pool_share),
        )
    return found


def _largest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def digest(kind: str, value: str) -> str:
    return hashlib.sha256(f"{kind}\0{value}".encode()).hexdigest()[:32]


class Store:
    """losses: counts how often it stopped to answer.

    Attributes:
        is_up: it answered last. None: it was not asked yet.
    """

    def __init__(self, url: str, losses: Counter):
        self._client = connect(url)
        self._losses = losses
        self._scripts = {
            text: self._client.register_script(text)
            for text in (_OPEN, _CLOSE, _RENEW, _TAKE, _KEEP)
        }
        self.is_up: bool | None = None

    async def ask(self, script: str, keys: Sequence[str], *args: str | int | bytes) -> Any:
        """Raises StoreLostError, at once while it is known."""
        if not self.is_up:
            raise StoreLostError("The store does not answer.")
        return await self.try_to_ask(script, keys, *args)

    async def try_to_ask(self, script: str, keys: Sequence[str], *args: str | int | bytes) -> Any:
        """The same, also of a store that did not answer last."""
        return await self._bounded(self._scripts[script](keys=keys, args=args))

    async def get(self, key: str) -> bytes | None:
        """Raises StoreLostError."""
        if not self.is_up:
            raise StoreLostError("The store does not answer.")
        found: bytes | None = await self._bounded(self._client.get(key))
        return found

    async def reports(self) -> list[GatewayReport]:
        """Raises StoreLostError."""
        found: list[GatewayReport] = await self._bounded(read_reports(self._client))
        return found

    async def _bounded(self, asking: Any) -> Any:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asking
        except (ValkeyError, OSError, TimeoutError) as error:
            if self.is_up is not False:
                self.is_up = False
                self._losses.inc()
                log.error("shared_limits_lost error=%r: gateways grant a part each", error)
            raise StoreLostError(f"The store does not answer: {type(error).__name__}.") from error

    async def close(self) -> None:
        await self._client.aclose()


@dataclass(frozen=True, slots=True)
class _Lease:
    """Of one session. keys: in the store, of its holders."""

    owner: str
    keys: list[str]


class SharedSessions(OpenSessions):
    """Sessions at all gateways."""

    def __init__(self, parts: GatewayParts, store: Store, gateway: str):
        super().__init__(parts.config.limits)
        self._store = store
        self._names = (f"{gateway}.{number}" for number in count(1))
        self.leases: dict[str, _Lease] = {}  # by name

    async def open(self, owner: str, secret: str | None = None) -> ExitStack:
        limits = self._holders(owner, secret)
        name, keys = next(self._names), [_PREFIX + digest("sessions", one) for one in limits]
        most = [-1 if limit is None else limit for limit in limits.values()]
        try:
            full = await self._store.ask(_OPEN, keys, name, int(1000 * LEASE_S), *most)
        except StoreLostError:
            counted = await super().open(owner, secret)
        else:
            if full:
                raise self._too_many(full - 1)
            counted = self._count(*limits)
        self.leases[name] = _Lease(owner, keys)
        counted.callback(self._end, name)
        return counted

    def _end(self, name: str) -> None:
        keys = self.leases.pop(name).keys
        background(self._free(keys, name), "free a shared session")

    async def _free(self, keys: list[str], name: str) -> None:
        with suppress(StoreLostError):  # the lease ends by itself
            await self._store.ask(_CLOSE, keys, name)


class SharedResponses(RateLimits):
    """Responses at all gateways."""

    def __init__(self, parts: GatewayParts, store: Store, gateway: str):
        limits = parts.config.limits
        super().__init__(limits.max_responses_per_minute, parts.clock, limits.gateways)
        self._store = store
        self._names = (f"{gateway}.{number}" for number in count(1))
        self._elsewhere: dict[str, int] = {}  # within the last minute, by the store's last answer

    async def take(self, owner: str, n_responses: int = 1) -> RateLimitStatus | None:
        if self._limit is None:
            return None
        try:
            is_counted, n, wait_ms = await self._exchange(owner, n_responses, started=False)
        except StoreLostError:
            return super().take_now(owner, n_responses)
        if not is_counted:
            raise self._too_many(wait_ms / 1000)
        self._recent(owner).extend([self._clock.now_s()] * n_responses)
        return RateLimitStatus(self._limit, max(0, self._limit - n), WINDOW_S)

    def take_now(self, owner: str, n_responses: int = 1) -> RateLimitStatus | None:
        if self._limit is None or not self._store.is_up:
            return super().take_now(owner, n_responses)
        limit = max(0, self._limit - self._elsewhere.get(owner, 0))
        try:
            status = self._take(owner, n_responses, limit)
        except LiveError:
            background(self.learn(owner), "shared responses")  # the others' may be over by now
            raise
        background(self.learn(owner, n_responses), "shared responses")
        return RateLimitStatus(self._limit, status.remaining, status.reset_s)

    async def learn_all(self, owners: Iterable[str]) -> None:
        """Of all responses of these, and of those of whom some are counted."""
        active = {*owners, *(owner for owner in list(self._started) if self._recent(owner))}
        self._elsewhere = {owner: self._elsewhere.get(owner, 0) for owner in active}
        await asyncio.gather(*(self.learn(owner) for owner in active))

    async def learn(self, owner: str, n_started: int = 0) -> None:
        """Tell the store of responses that have started here, and learn of those elsewhere."""
        if self._limit is None:
            return
        with suppress(StoreLostError):  # this gateway then grants its part
            await self._exchange(owner, n_started, started=True)

    async def _exchange(self, owner: str, n: int, *, started: bool) -> tuple[int, int, float]:
        assert self._limit is not None, "without a limit nothing is counted"
        n_here = len(self._recent(owner))
        answer: tuple[int, int, float] = await self._store.ask(
            *(_TAKE, [_PREFIX + digest("responses", owner)], next(self._names)),
            *(n, self._limit, int(started), int(1000 * WINDOW_S)),
        )
        is_counted, n_all, wait_ms = answer
        if not started and is_counted:
            n_here += n
        self._elsewhere[owner] = max(0, n_all - n_here)
        return is_counted, n_all, float(wait_ms)


class _Kept(msgspec.Struct):
    """owner: digest of its key."""

    owner: str
    expires_at_s: float
    session: SessionForm | None


_kept = msgspec.json.Decoder(_Kept)


class SharedSecrets:
    """Client secrets, made at any gateway."""

    def __init__(self, parts: GatewayParts, store: Store):
        keys = (ANONYMOUS, *parts.config.keys.accepted)
        self._owners = {digest("owner", key): key for key in keys}
        self._store = store
        self._made: list[ClientSecret] = []  # here

    async def keep(self, secret: ClientSecret) -> None:
        """Raises CapacityError if the owner has too many."""
        self._made = [one for one in self._made if one.expires_at_s > time.time()]
        try:
            has_room = await self._write(secret, self._store.ask)
        except StoreLostError:
            has_room = True  # it is known here until the store is back
        if not has_room:
            raise CapacityError(f"{MAX_OF_OWNER} client secrets of one key", retry_after_s=60)
        self._made.append(secret)

    async def find(self, value: str) -> ClientSecret | None:
        """None also if the store does not answer, or the owner's key is no key of this gateway."""
        try:
            found = await self._store.get(_PREFIX + digest("secret", value))
        except StoreLostError:
            return None
        if (
            found is None
            or (owner := self._owners.get((kept := _kept.decode(found)).owner)) is None
        ):
            return None
        return ClientSecret(value, kept.expires_at_s, owner, kept.session)

    async def write_again(self) -> None:
        """Raises StoreLostError."""
        for secret in self._made:
            await self._write(secret, self._store.try_to_ask)

    async def _write(self, secret: ClientSecret, ask: Callable[..., Awaitable[Any]]) -> bool:
        owner, left_s = digest("owner", secret.owner), secret.expires_at_s - time.time()
        if left_s <= 0:
            return True
        kept = _Kept(owner, secret.expires_at_s, secret.session)
        keys = [_PREFIX + digest("secret", secret.value), _PREFIX + digest("secrets", owner)]
        held = msgspec.json.encode(kept)
        return bool(await ask(_KEEP, keys, held, int(1000 * left_s), MAX_OF_OWNER))


@dataclass(eq=False)
class SharedLimits(GatewayAddition):
    """url: of the store."""

    url: str
    parts: GatewayParts
    _name: str = field(init=False, default_factory=lambda: new_id("gateway"))
    _renewing: asyncio.Task[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        parts, registry = self.parts, self.parts.metrics.registry
        losses = Counter(
            "sglang_live_gateway_shared_limits_lost",
            "Times that the store of the shared limits stopped to answer.",
            registry=registry,
        )
        self._store = Store(self.url, losses)
        self._sessions = SharedSessions(parts, self._store, self._name)
        self._responses = SharedResponses(parts, self._store, self._name)
        self.secrets = SharedSecrets(parts, self._store)
        parts.open_sessions, parts.rate_limits, parts.shared = self._sessions, self._responses, self
        Gauge(
            "sglang_live_gateway_shared_limits_up",
            "Whether the store of the shared limits answers.",
            registry=registry,
        ).set_function(lambda: float(self._store.is_up or 0))
        self._counted: deque[tuple[float, int, int]] = deque()  # time, arrivals, ends

    def start(self) -> None:
        self._renewing = background(
            lasting(self._keep_up, "shared limits", self.parts.clock), "shared limits"
        )

    async def close(self) -> None:
        if self._renewing is not None:
            await end(self._renewing)
        await self._store.close()

    async def fleet(self) -> dict[str, Any]:
        """Body of GET /v1/capacity?scope=fleet. Raises StoreLostError."""
        reports = await self._store.reports()
        loads = [one.load for one in reports]
        n_more = sum(one.n_more for one in reports)
        whys = [one.why for one in loads if one.why]
        return {
            "object": "capacity",
            "gateways": len(reports),
            "sessions": {
                "open": sum(one.n_open for one in loads),
                "limit": sum(one.limit for one in loads),
                "more": n_more,
            },
            "reason": whys[0] if whys and not n_more else None,
            "budget_share": _largest(*(one.share for one in loads)),
            "stages": msgspec.to_builtins(slowest(reports)),
        }

    async def _keep_up(self) -> None:
        while True:
            with suppress(StoreLostError):  # counted and logged where it began
                await self._renew()
                leases = self._sessions.leases.values()
                await self._responses.learn_all(one.owner for one in leases)
            await self.parts.clock.sleep(RENEW_S)

    async def _renew(self) -> None:
        leases = [(key, name) for name, one in self._sessions.leases.items() for key in one.keys]
        keys = [_GATEWAYS, f"{_PREFIX}report:{self._name}", *(key for key, _ in leases)]
        names = [name for _, name in leases]
        report = msgspec.json.encode(self._report())
        is_known, n_gateways = await self._store.try_to_ask(
            _RENEW, keys, self._name, int(1000 * LEASE_S), report, *names
        )
        self._sessions.n_gateways = self._responses.n_gateways = max(1, n_gateways)
        if not self._store.is_up or not is_known:
            await self.secrets.write_again()
            self._store.is_up = True
            log.warning("shared_limits_up gateways=%d sessions=%d", n_gateways, len(leases))

    def _report(self) -> GatewayReport:
        now = self.parts.loop_lag.limited(self.parts.orchestrator.capacity_now())
        arrivals_per_s, ends_per_s = self._rates(now.n_arrived, now.n_ended)
        load = GatewayLoad(
            n_open=now.n_sessions,
            limit=now.limit,
            why=now.why,
            share=None if now.share is None else min(now.share, _MOST_SHARE),
            arrivals_per_s=arrivals_per_s,
            ends_per_s=ends_per_s,
        )
        p90_s = self.parts.stage_spans.p90_s()
        shares = {stage: share for stage, (share, _) in now.pools.items()}
        stages = {
            stage: StageLoad(p90_s=p90_s.get(stage), pool_share=shares.get(stage))
            for stage in {*p90_s, *shares}
        }
        return GatewayReport(load=load, n_more=now.n_more, stages=stages)

    def _rates(self, n_arrived: int, n_ended: int) -> tuple[float, float]:
        """Of arrivals and ends, per second."""
        now_s = self.parts.clock.now_s()
        self._counted.append((now_s, n_arrived, n_ended))
        while self._counted[0][0] < now_s - _RATE_S:
            self._counted.popleft()
        since_s, n_before, n_ended_before = self._counted[0]
        lasted_s = max(RENEW_S, now_s - since_s)
        return (n_arrived - n_before) / lasted_s, (n_ended - n_ended_before) / lasted_s
