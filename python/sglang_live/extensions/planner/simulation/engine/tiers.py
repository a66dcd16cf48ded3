"""KV of idle sessions when memory is short: eviction, copies on the host, loads and preloads.

Who is evicted, and whether KV is loaded ahead, is decided by bridge/session/idle.py and kv/. As in
bridge/tiers/: the end of a session is evicted first, and with a host tier copied there; a request
loads what is on the host while its prefill runs, and computes the rest again.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.extensions.planner.device_model.costs import LinkCosts
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.engine.session import SessionKv
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.kv.preload import (
    PROTECTED_S,
    REMAINING_SPEECH_S,
    RESERVE_SHARE,
    Admit,
    PreloadConfig,
    PreloadView,
    Wait,
    judge,
)
from sglang_live.messages import NextUseHint


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """
    token_bytes: of a token's KV. host_tokens: room on the host; 0: there is no such tier.
    preloads: whether KV is loaded when its user begins to speak.
    """

    link: LinkCosts
    token_bytes: float
    host_tokens: int = 0
    preloads: bool = False


class Tiers:
    """
    Attributes:
        counts: tokens evicted, lost, loaded by requests, preloaded; preloads by outcome.
    """

    def __init__(self, spec: TierSpec, events: Events, pool: KvPool):
        self._spec = spec
        self._events = events
        self._pool = pool
        self._idle = IdleSessions(page_size=1)
        self._config = PreloadConfig()
        self._sessions: dict[str, SessionKv] = {}
        self._to_device_s = self._to_host_s = 0.0  # when the link's directions are free
        self._host_used = 0
        self._unused: dict[str, tuple[float, int]] = {}
        self._wanting: set[str] = set()  # sessions whose preload waits for room
        self.counts: Counter[str] = Counter()
        pool.evictable = lambda: self._idle.tokens
        pool.evict = self._evict
        pool.wanted = lambda: bool(self._wanting)

    # --- sessions ---

    def begin(self, session: SessionKv) -> None:
        """A request of the session has come."""
        self._tick()
        self._idle.remove(session.session_id)
        self._unused.pop(session.session_id, None)
        self._wanting.discard(session.session_id)

    def end(self, session: SessionKv) -> None:
        """Its request has ended, and the session is idle."""
        self._tick()
        self._sessions[session.session_id] = session
        self._idle.request_ended(session.session_id)
        self._idle.put(session.session_id, session.n_device)

    def changed(self, session: SessionKv) -> None:
        """The idle session was truncated or compacted."""
        over = max(0, session.n_host - session.n_tokens)
        session.n_host -= over
        self._host_used -= over
        if session.session_id in self._idle:
            self._idle.put(session.session_id, session.n_device)

    def forget(self, session: SessionKv) -> None:
        self._host_used -= session.n_host
        session.n_host = 0
        self._idle.forget(session.session_id)
        self._sessions.pop(session.session_id, None)
        self._wanting.discard(session.session_id)

    def expect(self, hint: NextUseHint) -> None:
        """Record when the user will have heard the response, or a gap that was observed."""
        self._tick()
        self._idle.expect(hint)

    # --- loads ---

    def on_host(self, session: SessionKv) -> int:
        """Tokens that a request would load."""
        return max(0, min(session.n_host, session.n_tokens) - session.n_device)

    def load(self, session: SessionKv) -> Callable[[], float]:
        """What a request calls when its prefill is launched: returns the end of the load."""
        n_tokens = self.on_host(session)

        def begin() -> float:
            self._pool.take(n_tokens)
            self.counts["tokens_loaded"] += n_tokens
            return self._transfer(n_tokens)

        return begin

    def speech_started(self, session: SessionKv) -> None:
        """The session's user speaks: its KV is needed soon."""
        self._tick()
        self._idle.speech_started(session.session_id)
        if self._spec.preloads:
            self._review(session, self._events.now_s() + REMAINING_SPEECH_S)

    def _review(self, session: SessionKv, needed_at_s: float) -> None:
        if session.session_id not in self._idle:
            return
        self._tick()
        now_s, n_tokens = self._events.now_s(), self.on_host(session)
        if self._idle.is_speaking(session.session_id):
            needed_at_s = now_s + REMAINING_SPEECH_S
        verdict = judge(self._view(session, n_tokens, needed_at_s), self._config)
        self._wanting.discard(session.session_id)
        if isinstance(verdict, Wait) and verdict.reason == "memory":
            self._wanting.add(session.session_id)
        if isinstance(verdict, Admit) and verdict.limited_by == "memory":
            self._wanting.add(session.session_id)
        if isinstance(verdict, Wait):
            self._events.at(verdict.until_s, lambda: self._review(session, needed_at_s))
        elif isinstance(verdict, Admit):
            self._preload(session, verdict.n_tokens)
            if verdict.limited_by:
                until_s = now_s + self._config.retry_s
                self._events.at(until_s, lambda: self._review(session, needed_at_s))
        else:
            self.counts[f"preloads_skipped_{verdict.reason}"] += 1

    def _preload(self, session: SessionKv, n_tokens: int) -> None:
        until_s = self._events.now_s() + PROTECTED_S
        own = self._unused.get(session.session_id, (0.0, 0))[1]
        self._unused[session.session_id] = until_s, own + n_tokens
        self._pool.take(n_tokens)
        self.counts["tokens_preloaded"] += n_tokens
        self._transfer(n_tokens)
        # A request that comes before the end of the transfer waits for it on the device.
        session.n_device += n_tokens
        self._idle.put(session.session_id, session.n_device)
        self._idle.protect(session.session_id, until_s)

    def _view(self, session: SessionKv, n_tokens: int, needed_at_s: float) -> PreloadView:
        now_s, link = self._events.now_s(), self._spec.link
        self._unused = {sid: one for sid, one in self._unused.items() if one[0] > now_s}
        own = self._unused.get(session.session_id, (0.0, 0))[1]
        reserve = int(RESERVE_SHARE * self._pool.total)
        bytes_per_s = link.to_device_gb_per_s * 1e9
        return PreloadView(
            now_s=now_s,
            needed_at_s=needed_at_s,
            n_tokens=n_tokens,
            n_bytes=int(n_tokens * self._spec.token_bytes),
            bytes_per_s=bytes_per_s,
            latency_s=link.to_device_latency_us / 1e6,
            queued_bytes=int(max(0.0, self._to_device_s - now_s) * bytes_per_s),
            others_tokens=sum(n for _, n in self._unused.values()) - own,
            own_tokens=min(own, session.n_device),
            cap_tokens=int(self._config.max_protected_share * self._pool.total),
            free_tokens=self._pool.total - self._pool.used - reserve,
            later_tokens=self._idle.later_tokens(needed_at_s, n_tokens),
        )

    def _transfer(self, n_tokens: int) -> float:
        cost_s = self._spec.link.to_device_s(n_tokens * self._spec.token_bytes)
        self._to_device_s = max(self._to_device_s, self._events.now_s()) + cost_s
        return self._to_device_s

    # --- eviction ---

    def _evict(self, n_tokens: int) -> None:
        self._tick()
        for session_id, n_victim in self._idle.pick_victims(n_tokens):
            session = self._sessions[session_id]
            n_copied = min(session.n_device, session.n_host + self._host_left)
            if n_copied > session.n_host:
                n_bytes = (n_copied - session.n_host) * self._spec.token_bytes
                cost_s = self._spec.link.to_host_s(n_bytes)
                self._to_host_s = max(self._to_host_s, self._events.now_s()) + cost_s
                self._host_used += n_copied - session.n_host
                session.n_host = n_copied
            self.counts["tokens_evicted"] += n_victim
            self.counts["tokens_lost"] += min(n_victim, session.n_device - n_copied)
            session.n_device -= n_victim
            self._pool.release(n_victim)

    @property
    def _host_left(self) -> int:
        return max(0, self._spec.host_tokens - self._host_used)

    def _tick(self) -> None:
        self._idle.tick(self._events.now_s())
