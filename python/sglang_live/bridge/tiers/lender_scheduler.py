"""A scheduler that may lend pages of its KV pool (leases.py), and wakes up for leases.

Lent pages are no requests' and not free: SGLang's check for leaks counts them as held, and nothing
else counts them at all, neither policies nor the stage's load.
"""

import logging
import os
from dataclasses import replace
from math import ceil
from typing import Any

import zmq
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.pool_stats_observer import (
    PoolStats,
    SchedulerPoolStatsObserver,
)
from sglang.utils import TypeBasedDispatcher

from sglang_live.bridge.round_facts import Pool
from sglang_live.bridge.seams import STAGE_ENV
from sglang_live.bridge.tiers.elastic_scheduler import ElasticScheduler
from sglang_live.bridge.tiers.lease_facts import (
    BorrowerFacts,
    LenderFacts,
    member_of,
    unsupported_ranks,
)
from sglang_live.bridge.tiers.leases import Leases
from sglang_live.bridge.tiers.peer_memory import geometry_of, memory_of
from sglang_live.bridge.tiers.peer_tier import PeerTier
from sglang_live.engine_channel.lease_channel import LEASES_ENV, LEND, Bell
from sglang_live.kv.lending import LendingConfig, lendable
from sglang_live.kv.peer_layout import refusal

logger = logging.getLogger(__name__)

# For tests: values of LendingConfig, as "calm_s=1,window_s=5".
LENDING_ENV = "SGLANG_LIVE_LENDING"


class LenderScheduler(ElasticScheduler):
    """
    Attributes:
        leases: None if the engine does not lend.
    """

    leases: Leases | None = None
    pool_stats_observer: SchedulerPoolStatsObserver  # SGLang's

    def init_running_status(self) -> None:
        super().init_running_status()
        self._missing = 0  # tokens that a waiting request found too few
        if (peer := self._peer_tier()) is not None:
            wake_by(self, peer.leases.bell)
        role, _, path = os.environ.get(LEASES_ENV, "").partition(":")
        if role != LEND:
            return
        reason = self._refusal()
        if reason is not None:
            logger.error("lends_nothing reason=%s", reason)
            self._counts[f"leases_refused_{reason.partition(':')[0]}"] = 1.0
            return
        allocator = self.token_to_kv_pool_allocator
        kv = allocator.get_kvcache()
        shared = memory_of(kv)
        assert shared is not None  # _refusal() has looked
        geometry = geometry_of(kv, self.page_size)
        config = LendingConfig.of(os.environ.get(LENDING_ENV, ""))
        member = member_of(f"{os.environ.get(STAGE_ENV)}-{os.getpid()}", path)
        self.leases = Leases(allocator, self.tree_cache, geometry, shared, member, config)
        wake_by(self, self.leases.bell)
        most = lendable(allocator.size, self.leases.run_tokens, config)
        logger.info("lends_at_most tokens=%d of=%d", most, allocator.size)
        if not most:
            logger.warning("lends_nothing reason=reserve: it takes %d tokens", config.future_tokens)

    def _refusal(self) -> str | None:
        """Why the engine cannot lend; None if it can."""
        kv = self.token_to_kv_pool_allocator.get_kvcache()
        if self.server_args.enable_memory_saver:
            return "memory_saver: the engine may release its pool at any time"
        reason = refusal(geometry_of(kv, self.page_size)) or unsupported_ranks()
        if reason is None and memory_of(kv) is None:
            return "memory: its KV buffers are private to the process"
        return reason

    def _peer_tier(self) -> PeerTier | None:
        """None if the engine does not borrow."""
        tier = getattr(getattr(self.tree_cache, "session", None), "tier", None)
        peer: PeerTier | None = None if tier is None else tier.peer
        return peer

    # --- several ranks ---

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [(LenderFacts, self._on_lender_facts), (BorrowerFacts, self._on_borrower_facts)]
        )

    def _poll_timeout_aborts(self) -> list[Any]:
        """On rank 0; all ranks act on the facts in this round."""
        feeds = super()._poll_timeout_aborts()
        peer = self._peer_tier()
        for leases in (self.leases, peer.leases if peer is not None else None):
            if leases is not None and (facts := leases.facts_to_tell()) is not None:
                feeds = [facts, *feeds]
        return feeds

    def _on_lender_facts(self, facts: LenderFacts) -> None:
        assert self.leases is not None
        self.leases.told(facts)

    def _on_borrower_facts(self, facts: BorrowerFacts) -> None:
        peer = self._peer_tier()
        assert peer is not None
        peer.leases.told(facts)

    # --- counts ---

    def init_pool_stats_observer(self) -> None:
        super().init_pool_stats_observer()
        if self.leases is not None:
            own: SchedulerPoolStatsObserver = self.pool_stats_observer
            fields = {name: getattr(own, name) for name in own.__dataclass_fields__}
            self.pool_stats_observer = LenderPoolStats(fields, self.leases)

    def _pool(self) -> Pool:
        pool = super()._pool()
        if self.leases is None:
            return pool
        return replace(pool, total=pool.total - self.leases.tokens)

    def _totals(self) -> dict[str, float]:
        totals = super()._totals()
        return totals if self.leases is None else totals | self.leases.report()

    # --- a round ---

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> NextBatchPlan:
        if self.leases is not None:
            self.leases.step(len(running_batch.reqs), self._missing)
            self._missing = 0
            own = self.max_total_num_tokens - self.leases.tokens
            object.__setattr__(self.load_inquirer, "max_total_num_tokens", own)  # it is frozen
        return super().get_next_batch_to_run(running_batch, last_batch)

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        plan = super().get_new_batch_prefill(running_batch)
        if plan.batch_to_run is None and self.waiting_queue:
            self._note_missing(self.waiting_queue[0], plan.running_batch)
        return plan

    def _retract_for(self, waiting: list[Req], running_batch: ScheduleBatch) -> None:
        """Lent pages come back before another request loses its KV."""
        if waiting and self.leases is not None:
            # The policy offers SGLang no request that would not fit.
            self._note_missing(waiting[0], running_batch)
            if self._missing and self.leases.returns_soon:
                return
        super()._retract_for(waiting, running_batch)

    def _note_missing(self, req: Req, running_batch: ScheduleBatch) -> None:
        """A request waits for memory, and nothing that SGLang allocates ever fails."""
        if self.leases is not None:
            missing = ceil(self.missing_tokens(req, running_batch.reqs, self._pool().free))
            self._missing = max(self._missing, missing)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if self.leases is not None:
            self.leases.queued(len(req.origin_input_ids))
        super()._add_request_to_queue(req, is_retracted)


def wake_by(scheduler: Any, bell: Bell) -> None:
    """Have a bell end every wait of a scheduler's loop for input, as the sockets do."""
    scheduler._poller.register(bell.fd, zmq.POLLIN)
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.poller.register(bell.fd, zmq.POLLIN)


class LenderPoolStats(SchedulerPoolStatsObserver):
    """SGLang's view of its pool, in which lent pages are held, but not used."""

    def __init__(self, fields: dict[str, Any], leases: Leases):
        super().__init__(**fields)
        object.__setattr__(self, "_leases", leases)  # the base class is frozen

    def session_held_tokens(self) -> int:
        held: int = super().session_held_tokens()
        return held + self._leases.tokens

    def _get_token_info(self) -> PoolStats:
        stats = super()._get_token_info()
        stats.full_num_used -= self._leases.tokens
        own = self.max_total_num_tokens - self._leases.tokens
        stats.full_token_usage = stats.full_num_used / own if own else 0.0
        return stats
