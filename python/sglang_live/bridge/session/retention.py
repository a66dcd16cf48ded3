"""Which sessions keep how much, and when they are cut: between two requests, or two decode steps.

In: RetainSession from the stage; finished requests. Out: cuts in the session cache, Retained.
Owner: one Retention per scheduler; equal on all ranks, because all it hears is broadcast.
"""

import time

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_live.bridge.rounds import LinkRate, RoundStamp
from sglang_live.bridge.session.cache import SessionCache
from sglang_live.bridge.session.row_compact import shorten
from sglang_live.bridge.session.tokens import length_of
from sglang_live.engine_channel.messages import NextUseHint, Retained, RetainSession, SpeechStart
from sglang_live.kv.retention import Compaction, RetentionConfig


class Retention:
    def __init__(self, scheduler):
        self._scheduler = scheduler
        self._configs: dict[str, RetentionConfig] = {}  # as they were told last
        self._unasked: set[str] = set()
        self._running: dict[str, str] = {}  # by session, the request that may be cut
        self._finished: dict[str, None] = {}  # in order, which must be the same on all ranks
        self._counts = dict.fromkeys(
            ("sessions_compacted", "sessions_compacted_running", "tokens_compacted", "compact_s"),
            0.0,
        )

    def stamp(self, stamp: RoundStamp) -> None:
        sessions = self._sessions
        if sessions.idle is not None:
            sessions.idle.tick(stamp.now_s)
        if sessions.preloads is not None:
            sessions.preloads.tick(stamp.now_s, stamp.rate)

    def link_rate(self) -> LinkRate:
        """PromptMeasured here."""
        tier = self._sessions.tier
        return LinkRate(None, 0.0) if tier is None else tier.copies.rate()

    def expect(self, next_use: NextUseHint) -> None:
        sessions, session_id = self._sessions, next_use.session
        if sessions.idle is not None:
            sessions.idle.expect(next_use)
        if sessions.tier is not None:
            sessions.tier.expect(session_id)
        if sessions.preloads is not None:
            needed_s = sessions.idle.expected_s(session_id)
            sessions.preloads.expect(session_id, sessions.idle.now_s, needed_s)

    def speaks(self, start: SpeechStart) -> None:
        sessions = self._sessions
        if sessions.idle is not None:
            sessions.idle.speaks(start.session)
        if sessions.preloads is not None:
            sessions.tier.fetch(start.session)
            sessions.preloads.speaks(start.session, sessions.idle.now_s)

    def arrives(self, req: Req) -> None:
        """A request joins the queue."""
        if self._sessions.tier is not None and req.session is not None:
            self._sessions.tier.fetch(req.session.session_id)

    def ready(self, waiting: list[Req]) -> tuple[list[Req], list[Req]]:
        """Those that can begin, and those whose KV is on its way out of storage."""
        tier = self._sessions.tier
        if tier is None or not tier.fetches_any:
            return waiting, []
        coming = [r for r in waiting if r.session and tier.is_fetching(r.session.session_id)]
        return [req for req in waiting if req not in coming], coming

    def retain(self, order: RetainSession) -> Retained:
        self._configs.pop(order.session, None)
        self._unasked.discard(order.session)
        self._running.pop(order.session, None)
        if order.window_tokens:
            self._configs[order.session] = RetentionConfig(
                sink_tokens=order.sink_tokens,
                window_tokens=order.window_tokens,
                slack_tokens=order.slack_tokens,
            )
            if order.every_request:
                self._unasked.add(order.session)
            self._running[order.session] = order.running
        if order.acknowledge or order.every_request:
            # Nobody else would learn of it.
            self._cut(order.session)
        return self._state(order.session)

    def forget_closed(self) -> None:
        """To be called before a session opens: its id may be that of one that was closed."""
        is_open = self._scheduler.session_controller.__contains__
        self._configs = {sid: c for sid, c in self._configs.items() if is_open(sid)}
        self._unasked &= self._configs.keys()
        self._running = {sid: rid for sid, rid in self._running.items() if is_open(sid)}

    def finished(self, session_id: str) -> None:
        """A request of the session has ended."""
        if session_id in self._unasked:
            self._finished[session_id] = None

    def settle(self) -> None:
        """Cut the sessions whose requests have ended, before they get new ones."""
        while self._finished:
            self._cut(self._finished.popitem()[0])

    def bound_running(self, batch: ScheduleBatch) -> None:
        """Replies that are being written: their sessions must not outgrow the bound either."""
        if not self._configs:
            return
        for index, req in enumerate(batch.reqs):
            session_id = req.session.session_id if req.session is not None else None
            config = self._configs.get(session_id)
            if config is None or not self._is_over(req, config):
                continue
            if req.rid != self._running.get(session_id) and session_id not in self._unasked:
                continue
            began_s = time.perf_counter()
            if (cut := self._sessions.cuts.cut_running(req, config)) is not None:
                shorten(batch, index, cut.n_tokens)
                batch.multimodal_inputs = [r.multimodal_inputs for r in batch.reqs]
                self._count(cut, "sessions_compacted_running", began_s)
                if self._scheduler.rounds is not None:
                    self._scheduler.rounds.table.shrank(req.rid, cut.n_tokens)

    def report(self) -> dict[str, float]:
        idle, tier = self._sessions.idle, self._sessions.tier
        preloads = self._sessions.preloads
        return {
            **self._counts,
            "sessions_rebased": float(self._sessions.cuts.n_rebased),
            **(idle.report() if idle is not None else {}),
            **(tier.report() if tier is not None else {}),
            **(preloads.report() if preloads is not None else {}),
        }

    @property
    def _sessions(self) -> SessionCache:
        return self._scheduler.tree_cache.session

    def _cut(self, session_id: str) -> None:
        session = self._scheduler.session_controller.get(session_id)
        config = self._configs.get(session_id)
        if session is None or config is None:
            return
        began_s = time.perf_counter()
        if (cut := self._sessions.cuts.cut(session, config)) is not None:
            self._count(cut, "sessions_compacted", began_s)

    def _count(self, cut: Compaction, what: str, began_s: float) -> None:
        # For reports alone; nothing is decided by it.
        self._counts["compact_s"] += time.perf_counter() - began_s
        self._counts[what] += 1
        self._counts["tokens_compacted"] += cut.n_tokens

    def _is_over(self, req: Req, config: RetentionConfig) -> bool:
        # Cheap, because it is asked of every stream in every round.
        bound = config.sink_tokens + config.window_tokens + config.slack_tokens
        return req.kv.kv_committed_len > bound + 2 * self._sessions.page_size

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
