"""KV that comes back from the host while its caller still speaks, or before playback ends.

In: speech starts and outlooks, the round's time and the link's measured rate. Out: preloads of the
tier. Every decision follows from what is broadcast, so all ranks decide alike.
Owner: one Preloads per session cache, if the engine has a HiCache. LiveServe section 5.2.
"""

import heapq
import itertools
from dataclasses import dataclass

from sglang_live.bridge.rounds import LinkRate
from sglang_live.kv.preload import (
    PROTECTED_S,
    REMAINING_SPEECH_S,
    Admit,
    PreloadConfig,
    PreloadView,
    Wait,
    judge,
)

# Of the pool: what requests that run take between two looks must not be given away.
_RESERVE_SHARE = 0.05
# Before playback ends there is time to wait until others have made room.
_AHEAD_S = 1.0


@dataclass(slots=True)
class _Ask:
    """For one session's KV. waits_for: why the last look at it said that it should wait."""

    number: int
    asked_at_s: float
    needed_at_s: float
    waits_for: str = ""


class Preloads:
    """
    Args:
        sessions: the LiveSession, with a tier.
    """

    def __init__(self, sessions, config: PreloadConfig | None = None):
        self._sessions, self._config = sessions, config or PreloadConfig()
        self._asks: dict[str, _Ask] = {}
        self._looks: list[tuple[float, int, str]] = []  # a heap; stale entries have other numbers
        self._numbers = itertools.count()
        # Preloaded and not used yet, by session: (until when it is kept, tokens).
        self._warm: dict[str, tuple[float, int]] = {}
        self.rate = LinkRate(None, 0.0)
        self.counts: dict[str, float] = {}

    def speaks(self, session_id: str, now_s: float) -> None:
        """A request will follow when its caller is done."""
        self._ask(session_id, now_s, now_s, now_s + REMAINING_SPEECH_S)
        self.tick(now_s, self.rate)  # an idle engine's next round may be a second away

    def expect(self, session_id: str, now_s: float, needed_at_s: float | None) -> None:
        """Nobody speaks, but by then its caller will have. None: nobody knows.

        Looked at in time for the transfer, and for a wait.
        """
        n_tokens = self._sessions.tier.tokens_to_preload(session_id)
        if needed_at_s is None or n_tokens == 0 or self.rate.bytes_per_s is None:
            return
        ask = self._asks.get(session_id)
        if ask is not None and ask.asked_at_s <= now_s:
            return  # it waits for memory already, perhaps because its caller speaks
        cost_s = n_tokens * self._sessions.tier.copies.bytes_per_token / self.rate.bytes_per_s
        look_s = needed_at_s - self._config.safety * cost_s - _AHEAD_S
        self._ask(session_id, max(now_s, look_s), max(now_s, look_s), needed_at_s)

    def forget(self, session_id: str) -> None:
        """Its request is there, or it is closed."""
        ask = self._asks.pop(session_id, None)
        if ask is not None and ask.waits_for:
            self._count(f"preloads_overtaken_{ask.waits_for}")
        self._warm.pop(session_id, None)

    def tick(self, now_s: float, rate: LinkRate) -> None:
        """A round begins. rate: as rank 0 measured it."""
        self.rate = rate
        while self._looks and self._looks[0][0] <= now_s:
            _, number, session_id = heapq.heappop(self._looks)
            ask = self._asks.get(session_id)
            if ask is not None and ask.number == number:
                self._look(session_id, ask, now_s)

    def _ask(self, session_id: str, look_s: float, asked_at_s: float, needed_at_s: float) -> None:
        number = next(self._numbers)
        self._asks[session_id] = _Ask(number, asked_at_s, needed_at_s)
        heapq.heappush(self._looks, (look_s, number, session_id))

    def _look(self, session_id: str, ask: _Ask, now_s: float) -> None:
        view = self._view(session_id, ask.needed_at_s, now_s)
        verdict = judge(view, self._config)
        if isinstance(verdict, Wait):
            ask.waits_for = verdict.reason
            heapq.heappush(self._looks, (verdict.until_s, ask.number, session_id))
            return
        del self._asks[session_id]
        if not isinstance(verdict, Admit):
            self._count(f"preloads_skipped_{verdict.reason}")
            return
        if not self._sessions.tier.has_row_to_spare(session_id):
            self._count("preloads_without_room")
            return
        until_s = now_s + PROTECTED_S
        self._sessions.idle.protect(session_id, until_s)
        with self._sessions.tier.keeping(session_id):
            self._make_room(view.n_tokens, view.needed_at_s)
        if self._sessions.tier.preload(session_id):
            self._warm[session_id] = (until_s, view.n_tokens)
            self._sessions.resized(session_id)
            self._sessions.idle.protect(session_id, until_s)
        else:
            self._count("preloads_without_room")

    def _view(self, session_id: str, needed_at_s: float, now_s: float) -> PreloadView:
        sessions, tier, config = self._sessions, self._sessions.tier, self._config
        speaks = sessions.idle.is_speaking(session_id)
        share = config.max_protected_share if speaks else config.max_expected_share
        n_tokens = tier.tokens_to_preload(session_id)
        allocator = sessions.token_to_kv_pool_allocator
        free = allocator.available_size() + sessions.inner.tree_evictable_size()
        return PreloadView(
            now_s=now_s,
            needed_at_s=needed_at_s,
            n_tokens=n_tokens,
            n_bytes=n_tokens * tier.copies.bytes_per_token,
            bytes_per_s=self.rate.bytes_per_s,
            latency_s=self.rate.latency_s,
            queued_bytes=0,
            protected_tokens=self._warm_tokens(now_s),
            cap_tokens=int(share * allocator.size),
            free_tokens=free - int(_RESERVE_SHARE * allocator.size),
            later_tokens=sessions.idle.later_tokens(needed_at_s, n_tokens),
        )

    def _warm_tokens(self, now_s: float) -> int:
        self._warm = {sid: warm for sid, warm in self._warm.items() if warm[0] > now_s}
        return sum(n_tokens for _, n_tokens in self._warm.values())

    def _make_room(self, n_slots: int, later_than_s: float) -> None:
        """From what is used later, prompts that no call holds first."""
        sessions = self._sessions
        missing = n_slots - sessions.token_to_kv_pool_allocator.available_size()
        if missing > 0:
            missing -= sessions.inner.evict_tree(missing)
        if missing > 0:
            sessions.give_back(missing, later_than_s=later_than_s)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0.0) + 1

    def report(self) -> dict[str, float]:
        return dict(self.counts)
