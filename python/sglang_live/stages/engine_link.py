"""How a stage and its engine's scheduler talk beside requests.

In: orders and what was heard, from the stage's jobs; what the scheduler reports. Out: Feed, over a
socket; totals and events of the policies, to the jobs that they are about.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable

import msgspec
import zmq
import zmq.asyncio

from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.engine_channel.inbox import QUEUE_MESSAGES
from sglang_live.messages import (
    Feed,
    Heard,
    HeardOfMany,
    PolicyReport,
    Report,
    StreamEvent,
    StreamEvents,
)
from sglang_live.stages.endings import EXIT_STUCK
from sglang_live.stages.transport.server import ServedJob

log = logging.getLogger(__name__)


class Reports:
    """Receives what a scheduler's process reports to its stage (PULL)."""

    def __init__(self, address: str):
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(Report)

    async def __aiter__(self) -> AsyncIterator[Report]:
        while True:
            yield self._decoder.decode(await self._socket.recv())


class FeedSocket:
    """Sends to a scheduler's Inbox (PUSH)."""

    def __init__(self, address: str):
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, feed: Feed) -> None:
        """Send without waiting. Exits if the scheduler reads nothing, to be started anew."""
        try:
            self._socket.send(self._encoder.encode(feed), zmq.NOBLOCK)
        except zmq.Again:
            log.critical("scheduler_does_not_read messages=%d", QUEUE_MESSAGES)
            logging.shutdown()
            os._exit(EXIT_STUCK)


# The duration of a decode round on a fast device; more frequent messages have no effect.
FLUSH_EVERY_S = 0.02


class HeardFeed:
    """Tells the engine what was heard of many requests, in few messages; none without news."""

    def __init__(self, send: Callable[[HeardOfMany], None], clock: Clock):
        self._send = send
        self._clock = clock
        self._newest: dict[str, Heard] = {}
        self._flushing: asyncio.Task[None] | None = None

    def put(self, rid: str, news: Heard) -> None:
        """The last value counts."""
        self._newest[rid] = news
        if self._flushing is None:
            self._flushing = background(self._flush(), "heard feed")

    def forget(self, rid: str) -> None:
        """The request is over: drop its news."""
        self._newest.pop(rid, None)

    async def _flush(self) -> None:
        try:
            while self._newest:
                newest, self._newest = self._newest, {}
                news = newest.values()
                self._send(
                    HeardOfMany.of(
                        list(newest),
                        heard_s=[one.heard_s for one in news],
                        advancing=[one.advancing for one in news],
                        speed=[one.speed for one in news],
                    )
                )
                await self._clock.sleep(FLUSH_EVERY_S)
        finally:
            self._flushing = None  # after an error the next news begin anew


class StreamEventRoutes:
    """Passes on what the policies did with single requests. Events of ended jobs are dropped."""

    def __init__(self) -> None:
        self._jobs: dict[str, ServedJob] = {}

    def add(self, rid: str, job: ServedJob) -> None:
        self._jobs[rid] = job

    def remove(self, rid: str) -> None:
        self._jobs.pop(rid, None)

    def pass_on(self, events: StreamEvents) -> None:
        for rid, what, buffered_s in zip(events.rids, events.what, events.buffered_s, strict=True):
            if (job := self._jobs.get(rid)) is not None:
                job.post(StreamEvent(job.job_id, what, buffered_s))


class PolicyTotals:
    """What the engine's policies have done so far, for the stage's load."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}

    def take(self, report: PolicyReport) -> None:
        self._totals = report.totals

    def load(self) -> dict[str, float]:
        """Gauges; empty until the policies have reported."""
        return {f"policy_{name}": value for name, value in self._totals.items()}
