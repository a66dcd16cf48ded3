"""Sessions between two requests: the memory they hold is lent, and given back when it is needed.

SGLang pins a session's KV until it closes. Here the KV of a session without a request counts as
evictable, like the radix tree's. When memory is short, who is expected to speak last gives way
first, from the end of its KV: what is missing at its next request is computed anew, the beginning
stays. Who has begun to speak gives way last.
Owner: one IdleSessions per session cache; equal on all ranks, because all it hears is broadcast.
"""

import math

from sglang_live.engine_channel.messages import NextUseHint
from sglang_live.kv.next_use import NextUse
from sglang_live.kv.preload import PROTECTED_S
from sglang_live.kv.victim_index import Candidate, Victim, VictimIndex


class IdleSessions:
    """
    now_s: time of the scheduling round. tokens: that could be given back.
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
        """A round begins."""
        self.now_s = now_s
        self._index.peek(now_s)  # protection that has run out ends here

    def put(self, session_id: str, n_tokens: int) -> None:
        """It has no request now, and n_tokens of its own behind what the tree holds for it."""
        self._rank(session_id, n_tokens)
        if self.is_speaking(session_id) and session_id in self._index:
            self._index.protect(session_id, self._speaking_until_s[session_id])

    def remove(self, session_id: str) -> None:
        self._index.remove(session_id)

    def forget(self, session_id: str) -> None:
        """It is closed."""
        self.remove(session_id)
        self._next_use.forget(session_id)
        self._speaking_until_s.pop(session_id, None)

    def expect(self, hint: NextUseHint) -> None:
        """When its caller will be heard again."""
        self._next_use.plays_until(hint.session, self.now_s + hint.buffered_s)
        self._next_use.set_user_gap(hint.session, hint.response_gap_s)
        if hint.observed_gap_s is not None:
            self._next_use.observe_gap(hint.observed_gap_s)
        self._rank(hint.session, self._index.n_tokens(hint.session))

    def answered(self, session_id: str) -> None:
        """A request of it has come to its end: what its caller said is computed."""
        self._speaking_until_s.pop(session_id, None)

    def speaks(self, session_id: str) -> None:
        """Its caller has begun: a request will follow."""
        until_s = self._speaking_until_s[session_id] = self.now_s + PROTECTED_S
        if session_id in self._index:
            self._index.protect(session_id, until_s)

    def is_speaking(self, session_id: str) -> bool:
        return self._speaking_until_s.get(session_id, self.now_s) > self.now_s

    def _rank(self, session_id: str, n_tokens: int) -> None:
        expected_s = self._next_use.expected(session_id)
        self._index.put(session_id, n_tokens=n_tokens, last_use_s=self.now_s, next_use_s=expected_s)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._index

    def protect(self, session_id: str, until_s: float) -> None:
        """Whoever speaks is protected longer by that, if at all."""
        until_s = max(until_s, self._speaking_until_s.get(session_id, until_s))
        if session_id in self._index:
            self._index.protect(session_id, until_s)

    def expected_s(self, session_id: str) -> float | None:
        """When its KV will be needed; None: nobody knows."""
        return self._next_use.expected(session_id)

    def first(self) -> Candidate | None:
        """Who would give way now, and how much there is of it."""
        return self._index.peek(self.now_s)

    def later_tokens(self, later_than_s: float, enough_tokens: int) -> int:
        """How much could be given back by those that are needed after that; counts to enough."""
        return self._index.later_tokens(self.now_s, later_than_s, enough_tokens)

    def give_back(self, n_tokens: int, later_than_s: float = -math.inf) -> list[tuple[str, int]]:
        """Who gives back how much, at least n_tokens in all if there are so many.

        later_than_s: only those that are needed after that.
        """
        victims = self._index.victims(n_tokens, self.now_s, later_than_s=later_than_s)
        missing = n_tokens - sum(victim.n_tokens for victim in victims)
        if missing > 0 and later_than_s == -math.inf:
            victims += self._victims_among_protected(missing)
        self.counts["sessions_evicted"] += len(victims)
        self.counts["tokens_evicted"] += sum(victim.n_tokens for victim in victims)
        return [(victim.key, victim.n_tokens) for victim in victims]

    def _victims_among_protected(self, n_tokens: int) -> list[Victim]:
        """A request that can run now is worth more than one that will come."""
        protected = self._index.protected()
        for session_id, _ in protected:
            self._index.unprotect(session_id)
        victims = self._index.victims(n_tokens, self.now_s)
        for session_id, until_s in protected:
            if session_id in self._index:
                self._index.protect(session_id, until_s)
        self.counts["protected_evicted"] += len(victims)
        return victims

    def report(self) -> dict[str, float]:
        return {
            **self.counts,
            "victims_by_estimate": float(self._index.picks_known),
            "victims_by_lru": float(self._index.picks_lru),
            "tokens_idle": float(self.tokens),
        }
