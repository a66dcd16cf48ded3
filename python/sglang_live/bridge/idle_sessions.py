"""Sessions between two requests: the memory they hold is lent, and given back when it is needed.

SGLang pins a session's KV until it closes. Here the KV of a session without a request counts as
evictable, like the radix tree's. When memory is short, who will speak last gives way first, from
the end of its KV: what is missing at its next request is computed anew, the beginning stays.
Owner: one IdleSessions per session cache.
"""

from sglang.srt.session.streaming_session import _VirtualNode

from sglang_live.kv.victim_index import VictimIndex


class Place(_VirtualNode):
    """Stands for a session's KV where SGLang locks nodes of the tree.

    n_pins: locks by requests that run, or are just being considered.
    """

    def __init__(self, session_id: str):
        self.session_id, self.n_pins = session_id, 0


class IdleSessions:
    """
    now_s: time of the scheduling round. tokens: that could be given back.
    """

    def __init__(self, page_size: int):
        self._index = VictimIndex(page_size)
        self.now_s = 0.0
        self.counts = {"sessions_gave_way": 0.0, "tokens_given_back": 0.0}

    @property
    def tokens(self) -> int:
        return self._index.evictable_tokens

    def put(self, session_id: str, n_tokens: int) -> None:
        """It has no request now, and n_tokens of its own behind what the tree holds for it."""
        self._index.put(session_id, n_tokens=n_tokens, last_use_s=self.now_s)

    def remove(self, session_id: str) -> None:
        self._index.remove(session_id)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._index

    def give_back(self, n_tokens: int) -> list[tuple[str, int]]:
        """Who gives back how much, at least n_tokens in all if there are so many."""
        victims = self._index.victims(n_tokens, self.now_s)
        self.counts["sessions_gave_way"] += len(victims)
        self.counts["tokens_given_back"] += sum(victim.n_tokens for victim in victims)
        return [(victim.key, victim.n_tokens) for victim in victims]

    def report(self) -> dict[str, float]:
        return {
            **self.counts,
            "victims_by_estimate": float(self._index.picks_known),
            "victims_by_lru": float(self._index.picks_lru),
            "tokens_idle": float(self.tokens),
        }
