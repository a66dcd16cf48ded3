"""How much KV each session retains, and when it is compacted.

Sessions are compacted between two requests, or between two decode steps.
In: RetainSession from the stage; finished requests. Out: compactions, Retained.
Owner: one Retention per scheduler; equal on all ranks, because its inputs are broadcast.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_live.bridge.cache.session_cache import SessionCache
from sglang_live.bridge.scheduler.part import Part
from sglang_live.bridge.session.compact import length_of, shorten
from sglang_live.kv.retention import Compaction, RetentionConfig
from sglang_live.messages import Retained, RetainSession


class Retention(Part):
    def start(self) -> None:
        self._configs: dict[str, RetentionConfig] = {}  # the latest of each session
        # Sessions that are compacted after and during every request.
        self._automatic: set[str] = set()
        # By session, the request that may be compacted while it decodes.
        self._running: dict[str, str] = {}
        # Sessions of finished requests, in an order that is the same on all ranks.
        self._finished: dict[str, None] = {}
        self._counts = dict.fromkeys(
            ("sessions_compacted", "sessions_compacted_running", "tokens_compacted", "compact_s"),
            0.0,
        )

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {RetainSession: self._on_retain}

    def _on_retain(self, order: RetainSession) -> None:
        retained = self.retain(order)
        if order.acknowledge:
            self._scheduler.channel.send(msgspec.structs.replace(retained, ask_id=order.ask_id))

    def retain(self, order: RetainSession) -> Retained:
        self._configs.pop(order.session_id, None)
        self._automatic.discard(order.session_id)
        self._running.pop(order.session_id, None)
        if order.window_tokens:
            self._configs[order.session_id] = RetentionConfig(
                sink_tokens=order.sink_tokens,
                window_tokens=order.window_tokens,
                slack_tokens=order.slack_tokens,
            )
            if order.every_request:
                self._automatic.add(order.session_id)
            self._running[order.session_id] = order.running
        if order.acknowledge or order.every_request:
            # Without Retained the stage's count of the session's tokens would miss this compaction.
            self._compact(order.session_id)
        return self._state(order.session_id)

    def before_session(self) -> None:
        """A session that opens may have the id of a closed one."""
        is_open = self._scheduler.session_controller.__contains__
        self._configs = {sid: c for sid, c in self._configs.items() if is_open(sid)}
        self._automatic &= self._configs.keys()
        self._running = {sid: rid for sid, rid in self._running.items() if is_open(sid)}

    def ended(self, req: Req, first: bool) -> None:
        if req.session is not None and req.session.session_id in self._automatic:
            self._finished[req.session.session_id] = None

    def before_request(self) -> None:
        self.before_round()

    def before_round(self) -> None:
        """Compact the sessions whose requests have ended, before their next requests come."""
        while self._finished:
            self._compact(self._finished.popitem()[0])

    def before_decode(self, batch: ScheduleBatch) -> None:
        """Compact sessions that exceed their bound while a request of theirs decodes."""
        if not self._configs:
            return
        for index, req in enumerate(batch.reqs):
            if req.session is None:
                continue
            session_id: str = req.session.session_id
            config = self._configs.get(session_id)
            if config is None or not self._is_over(req, config):
                continue
            if req.rid != self._running.get(session_id) and session_id not in self._automatic:
                continue
            began_s = time.perf_counter()
            compaction = self._sessions.compaction.compact_running(req, config)
            if compaction is not None:
                shorten(batch, index, compaction.n_tokens)
                batch.multimodal_inputs = [r.multimodal_inputs for r in batch.reqs]
                self._count(compaction, "sessions_compacted_running", began_s)
                self._scheduler.compacted(req.rid, compaction.n_tokens)

    def totals(self) -> dict[str, float]:
        sessions = self._sessions
        return {
            **self._counts,
            "sessions_rebased": float(sessions.compaction.n_rebased),
            **(sessions.idle.report() if sessions.evicts_idle else {}),
            **sessions.tier.report(),
            **sessions.preloads.report(),
        }

    @property
    def _sessions(self) -> SessionCache:
        sessions: SessionCache = self._scheduler.tree_cache.session
        return sessions

    def _compact(self, session_id: str) -> None:
        session = self._scheduler.session_controller.get(session_id)
        config = self._configs.get(session_id)
        if session is None or config is None:
            return
        began_s = time.perf_counter()
        compaction = self._sessions.compaction.compact(session, config)
        if compaction is not None:
            self._count(compaction, "sessions_compacted", began_s)

    def _count(self, compaction: Compaction, what: str, began_s: float) -> None:
        # Ranks measure different durations: compact_s is for reports, no decision depends on it.
        self._counts["compact_s"] += time.perf_counter() - began_s
        self._counts[what] += 1
        self._counts["tokens_compacted"] += compaction.n_tokens

    def _is_over(self, req: Req, config: RetentionConfig) -> bool:
        # Cheap, because it runs for every request in every round.
        assert config.sink_tokens is not None  # retain() sets it
        bound = config.sink_tokens + config.window_tokens + config.slack_tokens
        n_tokens: int = req.kv.kv_committed_len
        return n_tokens > bound + 2 * self._sessions.cache.page_size

    def _state(self, session_id: str) -> Retained:
        session = self._scheduler.session_controller.get(session_id)
        slot = self._sessions.slots.get(session_id)
        if session is None or slot is None or session._inflight or not session.req_nodes:
            return Retained(session_id, n_tokens=-1)
        [node] = session.req_nodes.values()
        return Retained(
            session_id,
            n_tokens=length_of(session, node.req),
            sink_tokens=slot.kv.sink_tokens,
            n_dropped=slot.kv.n_dropped,
        )
