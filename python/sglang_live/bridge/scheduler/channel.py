"""The scheduler's channel to its stage: messages from it, and reports to it.

In: feed messages, drained once a round on rank 0. Out: acknowledgements, events, totals, from
rank 0. Owner: one Channel per scheduler.
"""

import time
from typing import Any

import zmq

from sglang_live.bridge.scheduler.part import Part
from sglang_live.engine_channel.inbox import (
    INBOX_ENV,
    OUTBOX_ENV,
    Inbox,
    Outbox,
    address_from_env,
)
from sglang_live.messages import PolicyReport, Report

REPORT_EVERY_S = 0.5


class Channel(Part):
    """Of the rank that SGLang sends requests to; on other ranks see SilentChannel."""

    def start(self) -> None:
        self._inbox = Inbox(address_from_env(INBOX_ENV))
        self._outbox = Outbox(address_from_env(OUTBOX_ENV))
        self._next_report_s = 0.0
        self._reported: dict[str, float] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._scheduler.ipc_channels.recv_from_tokenizer, zmq.POLLIN)
        self.wake_on(self._inbox.socket)

    def wake_on(self, source: Any) -> None:
        """Have a socket or file descriptor end every wait of the loop for input."""
        self._poller.register(source, zmq.POLLIN)
        if self._scheduler.idle_sleeper is not None:
            self._scheduler.idle_sleeper.poller.register(source, zmq.POLLIN)

    def no_wake_on(self, source: Any) -> None:
        self._poller.unregister(source)
        if self._scheduler.idle_sleeper is not None:
            self._scheduler.idle_sleeper.poller.unregister(source)

    def feeds(self, now_s: float) -> list[Any]:
        return list(self._inbox.drain())

    def wait(self, limit_s: float) -> None:
        self._poller.poll(max(1, round(1000 * limit_s)))

    def send(self, report: Report) -> None:
        self._outbox.send(report)

    def report(self, totals: Any, *, at_once: bool = False) -> None:
        """Send the totals if they have changed, twice a second at most.

        Args:
            totals: returns them.
        """
        # This rank alone reports, so it may use its own clock.
        if not at_once and time.monotonic() < self._next_report_s:
            return
        self._next_report_s = time.monotonic() + REPORT_EVERY_S
        if (now := totals()) != self._reported:
            self._reported = now
            self.send(PolicyReport(now))


class SilentChannel(Channel):
    """On ranks that neither receive nor report: they wait in the broadcast of rank 0's input."""

    def start(self) -> None: ...
    def wake_on(self, source: Any) -> None: ...
    def no_wake_on(self, source: Any) -> None: ...
    def feeds(self, now_s: float) -> list[Any]:
        return []

    def wait(self, limit_s: float) -> None: ...
    def send(self, report: Report) -> None: ...
    def report(self, totals: Any, *, at_once: bool = False) -> None: ...
