"""The scheduler's line to its stage: facts in, once a round, and reports out.

In: feed messages, drained on rank 0 and put on SGLang's own request broadcast, so every rank hears
the same in the same round. Out: answers, notes and totals, from rank 0.
"""

import time
from collections import OrderedDict

import zmq
from sglang.srt.managers.io_struct import OpenSessionReqInput, OpenSessionReqOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.utils import TypeBasedDispatcher

from sglang_live.bridge.rounds import LinkRate, RoundStamp, rounds_of
from sglang_live.bridge.scheduler.device_peers import DevicePeers
from sglang_live.bridge.scheduler.request_log import RequestLog
from sglang_live.bridge.session.retention import Retention
from sglang_live.bridge.session.truncate import truncate_session
from sglang_live.engine_channel.inbox import (
    INBOX_ENV,
    OUTBOX_ENV,
    RADIX_BACKEND,
    Inbox,
    Outbox,
    address_from_env,
    policies_from_env,
)
from sglang_live.engine_channel.messages import (
    Interrupt,
    NextUseHint,
    PolicyReport,
    Progress,
    RetainSession,
    SpeechStart,
    Truncated,
    TruncateSession,
)
from sglang_live.policy.config import PolicyConfig

REPORT_EVERY_S = 0.5
# An Interrupt may overtake its request, which travels on another socket; how many are remembered.
_MAX_EARLY_ENDS = 4096


class ReportingScheduler(Scheduler):
    policy_config: PolicyConfig  # of the stage

    # --- setting up ---

    def init_ipc_channels(self, port_args) -> None:
        super().init_ipc_channels(port_args)
        self.inbox: Inbox | None = None
        self.outbox: Outbox | None = None
        self._news = zmq.Poller()
        if self.ipc_channels.recv_from_tokenizer is not None:  # rank 0 only
            self.inbox = Inbox(address_from_env(INBOX_ENV))
            self.outbox = Outbox(address_from_env(OUTBOX_ENV))
            self._news.register(self.inbox.socket, zmq.POLLIN)
            self._news.register(self.ipc_channels.recv_from_tokenizer, zmq.POLLIN)

    def init_idle_sleeper(self) -> None:
        super().init_idle_sleeper()
        if self.idle_sleeper is not None and self.inbox is not None:
            self.idle_sleeper.poller.register(self.inbox.socket, zmq.POLLIN)

    def init_running_status(self) -> None:
        super().init_running_status()
        self.request_log = RequestLog(writes=self.outbox is not None)
        self._early_ends: OrderedDict[str, None] = OrderedDict()
        self._next_report_s, self._reported = 0.0, {}
        self._counts = dict.fromkeys(
            (
                "paused_retracted",
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
        self.rounds = rounds_of(policies, self.policy_config, self.server_args.chunked_prefill_size)
        is_bounded = self.server_args.radix_cache_backend == RADIX_BACKEND
        self.retention = Retention(self) if is_bounded else None
        # Rank 0 speaks and hears for all.
        shares = self.rounds is not None and self.outbox is not None
        self.device_peers = DevicePeers.from_env() if shares else None

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [
                (RoundStamp, self._on_stamp),
                (Progress, self._on_progress),
                (Interrupt, self._on_end_reply),
                (TruncateSession, self._on_truncate),
                (RetainSession, self._on_retain),
                (SpeechStart, self._on_speech_start),
                (NextUseHint, self._on_outlook),
            ]
        )

    # --- what comes in ---

    def _poll_timeout_aborts(self) -> list:
        # Called on rank 0 only; what it returns is broadcast with the requests of the round.
        feeds = self.inbox.drain() if self.inbox is not None else []
        if self.rounds is not None or self.retention is not None:
            rate = self.retention.link_rate() if self.retention is not None else LinkRate(None, 0.0)
            now_s = time.monotonic()
            urgent = self.device_peers is not None and self.device_peers.urgent(now_s)
            feeds = [RoundStamp(now_s, urgent, rate), *feeds]
        return [*feeds, *super()._poll_timeout_aborts()]

    def _on_stamp(self, stamp: RoundStamp) -> None:
        if self.rounds is not None:
            self.rounds.stamp(stamp)
        if self.retention is not None:
            self.retention.stamp(stamp)

    def _on_progress(self, news: Progress) -> None:
        if self.rounds is not None:
            self.rounds.progress(news)

    def _on_end_reply(self, end: Interrupt) -> None:
        live = [*self.waiting_queue, *self.collect_inflight_reqs()]
        if self.chunked_req is not None:
            live.append(self.chunked_req)
        reqs = {req for req in live if req.rid == end.rid}
        if not reqs:
            self._early_ends[end.rid] = None
            while len(self._early_ends) > _MAX_EARLY_ENDS:
                self._early_ends.popitem(last=False)
        for req in reqs:
            self._end(req)

    def _end_if_told(self, req: Req) -> bool:
        """It joins the queue; its end may have come first. True: somebody waits for that."""
        if req.rid not in self._early_ends:
            return False
        del self._early_ends[req.rid]
        self._end(req)
        return True

    def _end(self, req: Req) -> None:
        """Finish where it is. A limit on length is a finish that keeps a session's KV."""
        self._counts["interrupted"] += 1
        self.request_log.interrupted(req)
        if not isinstance(req.to_finish, FINISH_ABORT):
            req.sampling_params.max_new_tokens = len(req.output_ids)
        if self.rounds is not None:
            self.rounds.table.hurry(req.rid)

    def _on_truncate(self, cut: TruncateSession) -> None:
        n_tokens = truncate_session(self, cut.session, cut.n_tokens)
        self._counts["truncated" if n_tokens >= 0 else "truncations_refused"] += 1
        self.request_log.truncated(cut.session, n_tokens)
        if self.outbox is not None:
            self.outbox.send(Truncated(cut.session, n_tokens))

    def _on_retain(self, order: RetainSession) -> None:
        if self.retention is None:
            return
        retained = self.retention.retain(order)
        if order.acknowledge and self.outbox is not None:
            self.outbox.send(retained)

    def open_session(self, recv_req: OpenSessionReqInput) -> OpenSessionReqOutput | None:
        if self.retention is not None:
            self.retention.forget_closed()
        return super().open_session(recv_req)

    def _on_speech_start(self, start: SpeechStart) -> None:
        self._counts["speech_starts"] += 1
        if self.retention is not None:
            self.retention.speaks(start)

    def _on_outlook(self, next_use: NextUseHint) -> None:
        if self.retention is not None:
            self.retention.expect(next_use)

    # --- what goes out ---

    def report(self, at_once: bool = False) -> None:
        # Rank 0 alone reports, so it may look at its own clock.
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
        return totals
