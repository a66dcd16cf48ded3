"""KV of sessions on the device alone, in the place of a SessionTier (host.py)."""

from sglang.srt.managers.cache_controller import HiCacheAck
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.session.streaming_session import SessionSlot

from sglang_live.bridge.round_facts import LinkRate
from sglang_live.kv.retention import Compaction


class NoTier:
    """What is evicted is computed again."""

    def reset(self) -> None:
        """To be called when SGLang has emptied its pools."""

    # --- down ---

    def set_idle(self, session_id: str) -> None:
        """To be called when the session's request has ended."""

    def write_back(self) -> None:
        """To be called once a round."""

    @property
    def copies_any(self) -> bool:
        """Whether copies are to be made ahead of evictions, some in each round."""
        return False

    @property
    def is_draining(self) -> bool:
        """Whether copies have to leave a tier, so that the next round must come soon."""
        return False

    def save(self, session_id: str, slot: SessionSlot, n_kept: int) -> None:
        """To be called before the session's device slots behind n_kept are evicted."""

    def truncate(self, session_id: str, n_tokens: int) -> None:
        """To be called before the session is truncated to n_tokens."""

    def compact(self, session_id: str, compaction: Compaction) -> None:
        """To be called before the session loses these whole pages."""

    def discard(self, session_id: str) -> None:
        """To be called before the session's KV changes in place: its copies are dropped."""

    def forget(self, session_id: str) -> None:
        """Remove all data of a closed session."""

    # --- back ---

    def with_host_hit(self, session_id: str, result: MatchResult, n_key: int) -> MatchResult:
        """Extend a match on the device by the copy behind it.

        Args:
            n_key: tokens of the request.
        """
        return result

    def load_back(self, req: Req) -> tuple[int, object]:
        """Load the hit that with_host_hit() reported, or nothing.

        Returns:
            the number of loaded tokens, and the request's last node.
        """
        return 0, req.last_node

    # --- what is expected, and where it is ---

    def stamp(self, rates: tuple[LinkRate, LinkRate]) -> None:
        """Begin a round. rates: see measured()."""

    def measured(self) -> tuple[LinkRate, ...]:
        """The rates from the host and from a nearer tier that this rank has measured, if any."""
        return ()

    def expect(self, session_id: str) -> None:
        """To be called when the session's expected next use has changed."""

    def fetch(self, session_id: str) -> None:
        """Begin to read the session's stored tail to the host: its user speaks, or its request
        has come.
        """

    @property
    def fetches_any(self) -> bool:
        return False

    def is_fetching(self, session_id: str) -> bool:
        """Whether a request of the session should wait for its stored tail."""
        return False

    def settle(self) -> list[str]:
        """To be called once a round. Returns the sessions whose host copies may have grown."""
        return []

    def end_of(self, session_id: str, n_device: int) -> int:
        """The end of the session's KV on all tiers, given its end on the device."""
        return n_device

    # --- SGLang acknowledges ---

    def acknowledged(self, transfer: int) -> bool:
        """Record the end of a transfer. Returns False if it is not a session's."""
        return False

    def measure_write(self, ack: HiCacheAck) -> None:
        """To be called before a write is acknowledged."""

    def all_written(self) -> None:
        """To be called when SGLang has waited for every write in its queue, and emptied it."""

    def take_loads(self, finish_count: int | None) -> None:
        """Acknowledge the sessions' loads, before SGLang does so with its own.

        Args:
            finish_count: how many of the queue have ended on all ranks. None: not known yet.
        """

    def report(self) -> dict[str, float]:
        return {}
