"""The parts of schedulers that lend pages of their KV pools (leases.py), or keep KV in lent ones.

Lent pages are no requests' and not free: SGLang's check for leaks counts them as held, and nothing
else counts them at all, neither policies nor the stage's load.
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.pool_stats_observer import (
    PoolStats,
    SchedulerPoolStatsObserver,
)

from sglang_live.bridge.memory.kv_memory import allocated_by
from sglang_live.bridge.round_facts import Pool
from sglang_live.bridge.scheduler.part import Part, set_frozen
from sglang_live.engine_channel.inbox import STAGE_ENV
from sglang_live.extensions.lending.channel import LEASES_ENV, LEND, Member
from sglang_live.extensions.lending.engine.borrowing import Borrowing
from sglang_live.extensions.lending.engine.lease_facts import (
    BorrowerFacts,
    LenderFacts,
    member_of,
    unsupported_ranks,
)
from sglang_live.extensions.lending.engine.leases import Leases
from sglang_live.extensions.lending.engine.peer_copies import PeerCopies, is_supported
from sglang_live.extensions.lending.engine.peer_eviction import PeerEviction
from sglang_live.extensions.lending.engine.peer_memory import geometry_of, memory_of
from sglang_live.extensions.lending.engine.peer_tier import PeerTier
from sglang_live.extensions.lending.engine.shared_buffers import create_shared_buffers
from sglang_live.extensions.lending.layout import refusal
from sglang_live.extensions.lending.policy import LendingConfig, lendable

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler


def lending_part(scheduler: "LiveScheduler") -> Part:
    """Lends, or borrows."""
    role = os.environ[LEASES_ENV].partition(":")[0]
    return Lender(scheduler) if role == LEND else Borrower(scheduler)


class Borrower(Part):
    """Of an engine that keeps sessions' KV in pages that others lend."""

    def start(self) -> None:
        scheduler = self._scheduler
        sessions = scheduler.tree_cache.session
        kv = scheduler.token_to_kv_pool_allocator.get_kvcache()
        geometry = geometry_of(kv, scheduler.page_size)
        reason = refusal(geometry) or unsupported_ranks()
        host_pool = sessions.tier.copies.pool
        if not reason and not is_supported(host_pool):
            reason = f"layout: the host's pool is {host_pool.layout}, not layer_first"
        if reason:
            logger.error("borrows_nothing reason=%s", reason)
            scheduler.replace(self, Refused(scheduler, "borrowing", reason))
            return
        copies = PeerCopies(sessions.cache, sessions.tier.numbers)
        eviction = PeerEviction(sessions, copies, sessions.tier.eviction)
        self._leases = Borrowing(copies, eviction, geometry, kv, _member())
        sessions.tier.put_nearer(PeerTier(copies, eviction, self._leases))
        scheduler.channel.wake_on(self._leases.bell.fd)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {BorrowerFacts: self._leases.told}

    def feeds(self, now_s: float) -> list[Any]:
        facts = self._leases.facts_to_tell()
        return [] if facts is None else [facts]


class Lender(Part):
    def making_pools(self) -> AbstractContextManager[None]:
        return allocated_by(create_shared_buffers)

    def start(self) -> None:
        scheduler = self._scheduler
        reason = self._refusal()
        if reason:
            logger.error("lends_nothing reason=%s", reason)
            scheduler.replace(self, Refused(scheduler, "leases", reason))
            return
        self._missing = 0  # tokens that a waiting request found too few
        allocator = scheduler.token_to_kv_pool_allocator
        kv = allocator.get_kvcache()
        shared = memory_of(kv)
        assert shared is not None  # _refusal() has looked
        geometry = geometry_of(kv, scheduler.page_size)
        config = LendingConfig()
        self._leases = Leases(allocator, scheduler.tree_cache, geometry, shared, _member(), config)
        scheduler.channel.wake_on(self._leases.bell.fd)
        most = lendable(allocator.size, self._leases.run_tokens, config)
        logger.info("lends_at_most tokens=%d of=%d", most, allocator.size)
        if not most:
            logger.warning("lends_nothing reason=reserve: it takes %d tokens", config.future_tokens)

    def _refusal(self) -> str | None:
        """Why the engine cannot lend; None if it can."""
        scheduler = self._scheduler
        kv = scheduler.token_to_kv_pool_allocator.get_kvcache()
        if scheduler.server_args.enable_memory_saver:
            return "memory_saver: the engine may release its pool at any time"
        reason = refusal(geometry_of(kv, scheduler.page_size)) or unsupported_ranks()
        if reason is None and memory_of(kv) is None:
            return "memory: its KV buffers are private to the process"
        return reason

    @property
    def lent_tokens(self) -> int:
        return self._leases.tokens

    # --- several ranks ---

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {LenderFacts: self._leases.told}

    def feeds(self, now_s: float) -> list[Any]:
        facts = self._leases.facts_to_tell()
        return [] if facts is None else [facts]

    # --- counts ---

    def pool_stats(self, observer: SchedulerPoolStatsObserver) -> SchedulerPoolStatsObserver:
        fields = {name: getattr(observer, name) for name in observer.__dataclass_fields__}
        return LenderPoolStats(fields, self._leases)

    def pool(self, pool: Pool) -> Pool:
        return replace(pool, total=pool.total - self._leases.tokens)

    def totals(self) -> dict[str, float]:
        return self._leases.report()

    # --- a round ---

    def before_batch(self, running_batch: ScheduleBatch) -> None:
        self._leases.step(len(running_batch.reqs), self._missing)
        self._missing = 0
        scheduler = self._scheduler
        own = scheduler.max_total_num_tokens - self._leases.tokens
        set_frozen(scheduler.load_inquirer, "max_total_num_tokens", own)

    def finds_no_room(self, queue: list[Req], running_batch: ScheduleBatch) -> None:
        self._note_missing(queue[0], running_batch)

    def room_comes(self, req: Req, running_batch: ScheduleBatch) -> bool:
        """Lent pages come back before another request loses its KV."""
        # The policy offers SGLang no request that would not fit.
        self._note_missing(req, running_batch)
        return bool(self._missing) and self._leases.returns_soon

    def _note_missing(self, req: Req, running_batch: ScheduleBatch) -> None:
        """A request waits for memory, and nothing that SGLang allocates ever fails."""
        memory = self._scheduler.memory
        missing = ceil(memory.missing_tokens(req, running_batch.reqs, memory.state().free))
        self._missing = max(self._missing, missing)

    def queues(self, req: Req, is_retracted: bool) -> None:
        self._leases.queued(len(req.origin_input_ids))


class Refused(Part):
    """Of an engine that cannot lend, or cannot borrow."""

    def __init__(self, scheduler: "LiveScheduler", what: str, reason: str):
        super().__init__(scheduler)
        self._counts = {f"{what}_refused_{reason.partition(':')[0]}": 1.0}

    def totals(self) -> dict[str, float]:
        return self._counts


def _member() -> Member:
    """This rank; to be called on all ranks at once."""
    path = os.environ[LEASES_ENV].partition(":")[2]
    return member_of(f"{os.environ.get(STAGE_ENV)}-{os.getpid()}", path)


class LenderPoolStats(SchedulerPoolStatsObserver):
    """SGLang's view of its pool, in which lent pages are held, but not used."""

    def __init__(self, fields: dict[str, Any], leases: Leases):
        super().__init__(**fields)
        set_frozen(self, "_leases", leases)

    def session_held_tokens(self) -> int:
        held: int = super().session_held_tokens()
        return held + self._leases.tokens

    def _get_token_info(self) -> PoolStats:
        stats = super()._get_token_info()
        stats.full_num_used -= self._leases.tokens
        own = self.max_total_num_tokens - self._leases.tokens
        stats.full_token_usage = stats.full_num_used / own if own else 0.0
        return stats
