"""Order of eviction of idle sessions, those without a running or waiting request.

SGLang pins a session's KV until it closes. Here an idle session's KV is evictable, like the radix
tree's. The session whose next use is expected last is evicted first, from the end of its KV; its
next request computes what is missing. A session whose user speaks is evicted last.
Owner: one IdleSessions per session cache; equal on all ranks, because its inputs are broadcast.
"""

import math

from sglang_live.kv.next_use import NextUse
from sglang_live.kv.preload import PROTECTED_S
from sglang_live.kv.victim_index import Candidate, Victim, VictimIndex
from sglang_live.messages import NextUseHint


class IdleSessions:
    """
    Attributes:
        now_s: time of the scheduling round.
        tokens: evictable KV tokens of idle sessions.
    """

    def __init__(self, page_size: int):
        self._index = VictimIndex(page_size)
        self._next_use = NextUse()
        self._speaking_until_s: dict[str, float] = {}
        self.now_s = 0.0
        self.counts = dict.fromkeys(
            ("sessions_evicted", "protected_evicted", "tokens_evicted"), 0.0
        )

    @property
    def tokens(self) -> int:
        return self._index.evictable_tokens + self._index.protected_tokens

    def tick(self, now_s: float) -> None:
        """Begin a round."""
        self.now_s = now_s
        self._index.peek(now_s)  # ends expired protections

    def put(self, session_id: str, n_tokens: int) -> None:
        """Add an idle session.

        Args:
            n_tokens: of its own, behind its prefix in the tree.
        """
        self._rank(session_id, n_tokens)
        if self.is_speaking(session_id) and session_id in self._index:
            self._index.protect(session_id, self._speaking_until_s[session_id])

    def remove(self, session_id: str) -> None:
        self._index.remove(session_id)

    def forget(self, session_id: str) -> None:
        """Remove all data of a closed session."""
        self.remove(session_id)
        self._next_use.forget(session_id)
        self._speaking_until_s.pop(session_id, None)

    def expect(self, hint: NextUseHint) -> None:
        """Record when the session's next use is expected."""
        self._next_use.plays_until(hint.session_id, self.now_s + hint.to_play_s)
        self._next_use.set_user_gap(hint.session_id, hint.response_gap_s)
        if hint.observed_gap_s is not None:
            self._next_use.observe_gap(hint.observed_gap_s)
        self._rank(hint.session_id, self._index.n_tokens(hint.session_id))

    def request_ended(self, session_id: str) -> None:
        """Record that a request of the session has ended: the user's speech is computed."""
        self._speaking_until_s.pop(session_id, None)

    def speech_started(self, session_id: str) -> None:
        """Record that the session's user speaks: a request will follow."""
        until_s = self._speaking_until_s[session_id] = self.now_s + PROTECTED_S
        if session_id in self._index:
            self._index.protect(session_id, until_s)

    def speech_dismissed(self, session_id: str) -> None:
        """Record that the session's user does not speak after all."""
        if self._speaking_until_s.pop(session_id, None) is not None:
            self._index.unprotect(session_id)

    def is_speaking(self, session_id: str) -> bool:
        return self._speaking_until_s.get(session_id, self.now_s) > self.now_s

    def speaking(self) -> list[str]:
        """Sessions whose user speaks."""
        return [sid for sid, until_s in self._speaking_until_s.items() if until_s > self.now_s]

    def _rank(self, session_id: str, n_tokens: int) -> None:
        expected_s = self._next_use.expected(session_id)
        self._index.put(session_id, n_tokens=n_tokens, last_use_s=self.now_s, next_use_s=expected_s)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._index

    def protect(self, session_id: str, until_s: float) -> None:
        """Protect an idle session until until_s, or for longer if its user speaks."""
        until_s = max(until_s, self._speaking_until_s.get(session_id, until_s))
        if session_id in self._index:
            self._index.protect(session_id, until_s)

    def unprotect(self, session_id: str) -> None:
        """End a protection, unless the session's user speaks."""
        if not self.is_speaking(session_id):
            self._index.unprotect(session_id)

    def expected_s(self, session_id: str) -> float | None:
        """When the session's KV will be needed; None if unknown."""
        return self._next_use.expected(session_id)

    def tokens_of(self, session_id: str) -> int:
        """Its own KV tokens on the device; 0 if it is not idle."""
        return self._index.n_tokens(session_id)

    def next_victim(self) -> Candidate | None:
        """The session that is evicted next, with its evictable tokens."""
        return self._index.peek(self.now_s)

    def later_tokens(self, later_than_s: float, enough_tokens: int) -> int:
        """Evictable tokens of sessions that are needed after later_than_s.

        Counts up to enough_tokens only.
        """
        return self._index.later_tokens(self.now_s, later_than_s, enough_tokens)

    def pick_victims(self, n_tokens: int, later_than_s: float = -math.inf) -> list[tuple[str, int]]:
        """Choose sessions to evict, with the tokens of each: at least n_tokens in all, if possible.

        Args:
            later_than_s: choose only sessions that are expected to be needed after that time.
        """
        victims = self._index.victims(n_tokens, self.now_s, later_than_s=later_than_s)
        missing = n_tokens - sum(victim.n_tokens for victim in victims)
        if missing > 0 and later_than_s == -math.inf:
            victims += self._protected_victims(missing)
        self.counts["sessions_evicted"] += len(victims)
        self.counts["tokens_evicted"] += sum(victim.n_tokens for victim in victims)
        return [(str(victim.key), victim.n_tokens) for victim in victims]

    def _protected_victims(self, n_tokens: int) -> list[Victim]:
        """Choose among protected sessions: a request that can run now precedes a future one."""
        victims = self._index.victims(n_tokens, self.now_s, protected=True)
        self.counts["protected_evicted"] += len(victims)
        return victims

    def report(self) -> dict[str, float]:
        return {
            **self.counts,
            "victims_by_estimate": float(self._index.picks_known),
            "victims_by_lru": float(self._index.picks_lru),
            "tokens_idle": float(self.tokens),
        }
