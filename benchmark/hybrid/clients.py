"""Turns and best-effort work as requests to a running thinker.

In: turns, a supply of work. Out: took() and ended() of a Record. Requests go over SGLang's own API
with this project's ids; turns of conversations in sessions that hold their KV. That a listener
begins to hear is told over the control channel, as the stages behind a thinker tell it.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import aiohttp
import msgspec
import numpy as np

from benchmark.hybrid.conversations import TOKENS, Conversations
from benchmark.hybrid.listeners import LEAD_S, Job, Record
from benchmark.hybrid.workload import Work
from sglang_live.ids import BATCH_PREFIX, THINK_PREFIX
from sglang_live.messages import HeardOfMany
from sglang_live.policy.config import THINKER
from sglang_live.stages.engine_link import FeedSocket
from sglang_live.stages.spec import StageSpec

# Read by SGLang's priority scheduling alone; preemption needs a difference of more than ten.
_PRIORITY, _PRIORITY_OF_HEARD = 0, 100
# Tokens in one message. The first token comes at once, and of a message the first token is judged.
_HEARD_INTERVAL, _NO_STREAM = 2, 1 << 20


class SinceBegin:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._began_s


class _Meta(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_EVENTS = msgspec.json.Decoder(_Event)


def http_of(spec: StageSpec) -> aiohttp.ClientSession:
    """Many streams at once to SGLang's own API of a stage."""
    return aiohttp.ClientSession(
        "http://native",
        # The engine closes a connection after five idle seconds; the client must close it before.
        connector=aiohttp.UnixConnector(spec.native_socket, limit=0, keepalive_timeout=2.0),
        headers={"authorization": f"Bearer {spec.native_key}"},
        timeout=aiohttp.ClientTimeout(total=None),
    )


@dataclass(slots=True)
class Clients:
    """
    Args:
        feed: None: no policy hears of listeners.
        divisor: tokens of a prompt for which one token is sent.
    """

    http: aiohttp.ClientSession
    feed: FeedSocket | None
    record: Record
    conversations: Conversations
    divisor: int
    rng: np.random.Generator

    async def run(
        self, turns: list[Work], supply: Iterator[Work], n_best_effort: int, until_s: float
    ) -> None:
        """Ends after until_s seconds, whatever still runs.

        Args:
            n_best_effort: requests that are in flight all the time.
        Raises:
            ExceptionGroup: a request was refused, or the engine ended.
        """
        numbers = itertools.count()
        try:
            async with asyncio.timeout(until_s), asyncio.TaskGroup() as tasks:
                for turn in turns:
                    tasks.create_task(self._turn(turn, next(numbers)))
                for _ in range(n_best_effort):
                    tasks.create_task(self._work(supply, numbers))
                await asyncio.Event().wait()
        except TimeoutError:
            return

    async def _turn(self, work: Work, number: int) -> None:
        await asyncio.sleep(work.arrives_s - self.record.clock.now_s())
        job = Job(work, heard=True, arrives_s=work.arrives_s)
        self.record.jobs.append(job)
        session = await self.conversations.take(work) if work.cached_tokens else ""
        await self._ask(job, f"{THINK_PREFIX}{number:06d}", session)
        if session:
            self.conversations.release(session, work)

    async def _work(self, supply: Iterator[Work], numbers: Iterator[int]) -> None:
        while True:
            job = Job(next(supply), heard=False, arrives_s=self.record.clock.now_s())
            await self._ask(job, f"{BATCH_PREFIX}{next(numbers):06d}")

    async def _ask(self, job: Job, rid: str, session: str = "") -> None:
        body = self._body(job, rid)
        if session:
            body["session_params"] = {"id": session}
        async for n_tokens in self._tokens(body):
            if self.record.took(job, n_tokens) and job.heard and self.feed is not None:
                # What the thinker makes is heard after the stages behind it.
                told_s = LEAD_S + THINKER.stage.pipeline_s
                news = HeardOfMany.of([rid], [0.0], [True])
                asyncio.get_running_loop().call_later(told_s, self.feed.send, news)
        self.record.ended(job)

    def _body(self, job: Job, rid: str) -> dict[str, object]:
        n_new = job.work.prompt_tokens - job.work.cached_tokens
        return {
            "rid": rid,
            "input_ids": self.rng.integers(*TOKENS, max(1, n_new // self.divisor)).tolist(),
            "sampling_params": {
                "max_new_tokens": job.work.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream_interval": _HEARD_INTERVAL if job.heard else _NO_STREAM,
            },
            "stream": True,
            "priority": _PRIORITY_OF_HEARD if job.heard else _PRIORITY,
        }

    async def _tokens(self, body: dict[str, object]) -> AsyncIterator[int]:
        """Numbers of tokens as they come."""
        n_seen = 0
        async with self.http.post("/generate", json=body) as response:
            response.raise_for_status()
            async for text in response.content:
                if not text.startswith(b"data: {"):
                    continue
                event = _EVENTS.decode(text[6:])
                if event.meta_info is None:
                    raise RuntimeError(f"{body['rid']}: {bytes(event.error).decode()}")
                if (n_new := event.meta_info.completion_tokens - n_seen) > 0:
                    n_seen += n_new
                    yield n_new
