"""The scheduler's channel to its stage: feed messages once a round, and reports.

In: feed messages, drained on rank 0 and sent with SGLang's request broadcast, so every rank
applies the same messages in the same round. Out: acknowledgements, events, totals, from rank 0.
"""

import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import msgspec
import zmq
from sglang.srt.managers.io_struct import OpenSessionReqInput, OpenSessionReqOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.server_args import PortArgs
from sglang.utils import TypeBasedDispatcher

from sglang_live.bridge.rate_meter import RateMeter
from sglang_live.bridge.round_facts import LinkRate, RoundStamp
from sglang_live.bridge.rounds import rounds_of
from sglang_live.bridge.scheduler.device_peers import DevicePeers
from sglang_live.bridge.scheduler.request_log import RequestLog
from sglang_live.bridge.session.reap import ReapSessions, SessionReaper
from sglang_live.bridge.session.retention import Retention
from sglang_live.bridge.session.tier_events import TierEvents
from sglang_live.bridge.session.truncate import n_computed, streaming_sessions, truncate_session
from sglang_live.engine_channel.inbox import (
    INBOX_ENV,
    OUTBOX_ENV,
    RADIX_BACKEND,
    Inbox,
    Outbox,
    address_from_env,
    policies_from_env,
    policy_config_from_env,
)
from sglang_live.engine_channel.messages import (
    Interrupt,
    MeasureKv,
    NextUseHint,
    PolicyReport,
    Progress,
    Promote,
    RetainSession,
    SessionKv,
    SpeechDismissed,
    SpeechStart,
    Truncated,
    TruncateSession,
)
from sglang_live.policy.config import PolicyConfig

REPORT_EVERY_S = 0.5
# Orders that are kept until their request arrives: they come on another socket and may be first.
_MAX_EARLY_ORDERS = 4096


class ReportingScheduler(Scheduler):
    policy_config: PolicyConfig  # of the stage
    chunked_prefill_size: int | None  # SGLang's
    running_batch: ScheduleBatch  # SGLang's

    # --- setting up ---

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        self.inbox: Inbox | None = None
        self.outbox: Outbox | None = None
        self._poller = zmq.Poller()
        if self.ipc_channels.recv_from_tokenizer is not None:  # rank 0 only
            self.inbox = Inbox(address_from_env(INBOX_ENV))
            self.outbox = Outbox(address_from_env(OUTBOX_ENV))
            self._poller.register(self.inbox.socket, zmq.POLLIN)
            self._poller.register(self.ipc_channels.recv_from_tokenizer, zmq.POLLIN)

    def init_idle_sleeper(self) -> None:
        super().init_idle_sleeper()
        if self.idle_sleeper is not None and self.inbox is not None:
            self.idle_sleeper.poller.register(self.inbox.socket, zmq.POLLIN)

    def init_running_status(self) -> None:
        super().init_running_status()
        self.request_log = RequestLog(writes=self.outbox is not None)
        self._early_orders: OrderedDict[str, Interrupt | Promote] = OrderedDict()
        self._next_report_s = 0.0
        self._reported: dict[str, float] = {}
        self._counts = dict.fromkeys(
            (
                "paused_retracted",
                "running_retracted",
                "retracted",
                "interrupted",
                "truncated",
                "truncations_refused",
                "speech_starts",
            ),
            0.0,
        )
        policies = policies_from_env()
        self._reports = bool(policies)
        self.rounds = rounds_of(
            policies,
            policy_config_from_env(self.policy_config),
            self.server_args.chunked_prefill_size,
        )
        is_bounded = self.server_args.radix_cache_backend == RADIX_BACKEND
        self.retention = Retention(self) if is_bounded else None
        self.tier_events = TierEvents(self) if is_bounded else None
        self.reaper = SessionReaper(self.session_controller)
        # Rank 0 alone communicates with other engines, and measures.
        is_first = self.rounds is not None and self.outbox is not None
        self.device_peers = DevicePeers.from_env() if is_first else None
        predicts = self.rounds is not None and self.rounds.tells_best_effort
        self.meter = RateMeter(predicts=predicts) if is_first else None

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [
                (RoundStamp, self._on_stamp),
                (ReapSessions, self._on_reap),
                (Progress, self._on_progress),
                (Interrupt, self._on_interrupt),
                (Promote, self._on_promote),
                (TruncateSession, self._on_truncate),
                (MeasureKv, self._on_measure_kv),
                (RetainSession, self._on_retain),
                (SpeechStart, self._on_speech_start),
                (SpeechDismissed, self._on_speech_dismissed),
                (NextUseHint, self._on_next_use),
            ]
        )

    # --- feed messages ---

    def _poll_timeout_aborts(self) -> list[Any]:
        # SGLang calls it on rank 0 only, and broadcasts the result with the round's requests.
        now_s = time.monotonic()
        feeds: list[Any] = list(self.inbox.drain()) if self.inbox is not None else []
        feeds += self.reaper.due(now_s)
        if self.rounds is not None or self.tier_events is not None:
            events = self.tier_events
            rate = events.link_rate() if events is not None else LinkRate(None, 0.0)
            peer_rate = events.peer_rate() if events is not None else LinkRate(None, 0.0)
            stamp = RoundStamp(now_s, rate=rate, peer_rate=peer_rate)
            if (peers := self.device_peers) is not None:
                urgent, slack_s = peers.urgent(now_s), peers.slack_s(now_s)
                stamp = replace(stamp, peer_urgent=urgent, peer_slack_s=slack_s)
            if (meter := self.meter) is not None:
                stamp = replace(
                    stamp,
                    rates=meter.rates(now_s),
                    n_done=meter.n_done,
                    prefill_done_s=meter.prefill_done_s,
                    cost=meter.cost,
                )
            feeds = [stamp, *feeds]
        return [*feeds, *super()._poll_timeout_aborts()]

    def _on_stamp(self, stamp: RoundStamp) -> None:
        if self.rounds is not None:
            self.rounds.stamp(stamp)
        if self.tier_events is not None:
            self.tier_events.stamp(stamp)

    def _on_reap(self, order: ReapSessions) -> None:
        self.reaper.reap(order)

    def _on_progress(self, news: Progress) -> None:
        if self.rounds is not None:
            self.rounds.progress(news)

    def _on_interrupt(self, interrupt: Interrupt) -> None:
        live = [*self.waiting_queue, *self.collect_inflight_reqs()]
        if self.chunked_req is not None:
            live.append(self.chunked_req)
        reqs = {req for req in live if req.rid == interrupt.rid}
        if not reqs:
            self._keep_early(interrupt)
        for req in reqs:
            self._interrupt(req)

    def _on_promote(self, promote: Promote) -> None:
        if self.rounds is None:
            return
        if promote.rid in self.rounds.table:
            self.rounds.table.to_foreground(promote.rid)
        else:
            self._keep_early(promote)

    def _keep_early(self, order: Interrupt | Promote) -> None:
        self._early_orders[order.rid] = order
        while len(self._early_orders) > _MAX_EARLY_ORDERS:
            self._early_orders.popitem(last=False)

    def _follow_early_order(self, req: Req) -> bool:
        """Do with a request that joins the queue what came before it.

        Returns True if it was promoted.
        """
        order = self._early_orders.pop(req.rid, None)
        if isinstance(order, Interrupt):
            self._interrupt(req)
        return isinstance(order, Promote)

    def _interrupt(self, req: Req) -> None:
        """Finish a request at its current length. Unlike an abort, that keeps its session's KV."""
        self._counts["interrupted"] += 1
        self.request_log.interrupted(req)
        if not isinstance(req.to_finish, FINISH_ABORT):
            req.sampling_params.max_new_tokens = len(req.output_ids)

    def _on_truncate(self, order: TruncateSession) -> None:
        n_tokens = truncate_session(self, order.session, order.n_tokens)
        self._counts["truncated" if n_tokens >= 0 else "truncations_refused"] += 1
        self.request_log.truncated(order.session, n_tokens)
        if self.outbox is not None:
            self.outbox.send(Truncated(order.session, n_tokens, order.ask_id))

    def _on_measure_kv(self, order: MeasureKv) -> None:
        streaming = streaming_sessions(self.tree_cache)
        n_tokens = 0 if streaming is None else n_computed(streaming, order.session)
        if self.outbox is not None:
            self.outbox.send(SessionKv(order.session, n_tokens, order.ask_id))

    def _on_retain(self, order: RetainSession) -> None:
        if self.retention is None:
            return
        retained = self.retention.retain(order)
        if order.acknowledge and self.outbox is not None:
            self.outbox.send(msgspec.structs.replace(retained, ask_id=order.ask_id))

    def open_session(self, recv_req: OpenSessionReqInput) -> OpenSessionReqOutput | None:
        if self.retention is not None:
            self.retention.forget_closed()
        return super().open_session(recv_req)

    def _on_speech_start(self, start: SpeechStart) -> None:
        self._counts["speech_starts"] += 1
        if self.tier_events is not None:
            self.tier_events.speech_started(start)

    def _on_speech_dismissed(self, dismissed: SpeechDismissed) -> None:
        if self.tier_events is not None:
            self.tier_events.speech_dismissed(dismissed)

    def _on_next_use(self, hint: NextUseHint) -> None:
        if self.tier_events is not None:
            self.tier_events.next_use(hint)

    # --- reports ---

    def report(self, at_once: bool = False) -> None:
        # Rank 0 alone reports, so it may use its own clock.
        if self.outbox is None or (not at_once and time.monotonic() < self._next_report_s):
            return
        totals = self._totals()
        self._next_report_s = time.monotonic() + REPORT_EVERY_S
        if totals != self._reported:
            self._reported = totals
            self.outbox.send(PolicyReport(totals))

    def _totals(self) -> dict[str, float]:
        totals = dict(self._counts)
        if self.rounds is not None:
            totals |= self.rounds.report()
        if self.retention is not None:
            totals |= self.retention.report()
        if self.tier_events is not None:
            totals |= self.tier_events.report()
        return totals
