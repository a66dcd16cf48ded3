"""Jobs of a turn that go on in another replica when theirs is lost.

In: the loss of a stage's process, as its client reports it. Out: the same job in another replica,
which gets all input again, and is asked only for what has not come yet (stage_jobs.py). Ids, codes
and text of a response are small, so that the orchestrator keeps them while the turn runs.
A turn moves once: a request that ends a second replica must not end a third. What a host has of
other stages is lost with it, and moves with it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.errors import StageUnavailableError
from sglang_live.messages import AnyMessage
from sglang_live.orchestrator.suspects import SuspectError
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Replica
from sglang_live.stages.transport.client import Job, StageClient

log = logging.getLogger(__name__)


class Link(Protocol):
    """See _Link in stage_links.py."""

    known: set[str]

    @property
    def replica(self) -> Replica: ...

    def client(self) -> StageClient: ...


class LostJobs:
    """Counts jobs whose replica was lost, by stage and outcome. One per server."""

    def __init__(self) -> None:
        self.n: Counter[tuple[str, str]] = Counter()

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        jobs = CounterMetricFamily(
            "sglang_live_lost_jobs",
            "Jobs of turns whose replica was lost: moved, or why the turn failed.",
            labels=["stage", "outcome"],
        )
        for names, n in self.n.items():
            jobs.add_metric(names, n)
        yield jobs


class Move(Protocol):
    def make(
        self, link: Link, left: StageSpec, stays: str, lost: StageUnavailableError
    ) -> StageClient:
        """The client of another replica, to which the link leads from now on.

        Args:
            left: of the replica that is lost. The link may lead to another one already.
            stays: why the job cannot go on in another replica. "": it can.
        Raises:
            StageUnavailableError: it is `lost`, and so is the job.
        """
        ...


class NoMove:
    """Of jobs that are lost with their replica: something else does their work later."""

    def make(
        self, link: Link, left: StageSpec, stays: str, lost: StageUnavailableError
    ) -> StageClient:
        raise lost


NO_MOVE = NoMove()


@dataclass(eq=False, slots=True)
class TurnMove:
    """The only move of a turn.

    place: finds other replicas in the place of those that are down, for the turn's links.
    check: raises SuspectError if the turn's content was in engines that died.
    """

    turn_id: str
    place: Callable[[], None]
    check: Callable[[], None]
    lost_jobs: LostJobs
    _made_in: set[str] = field(default_factory=set)
    _left_host: str | None = None

    def make(
        self, link: Link, left: StageSpec, stays: str, lost: StageUnavailableError
    ) -> StageClient:
        # Of stages that this server has started all are on one.
        host = left.address.rpartition(":")[0]
        is_other = self._left_host not in (None, host) or left.stage in self._made_in
        outcome = stays or ("moved_before" if is_other else "moved")
        client: StageClient | None = None
        if outcome == "moved":
            try:
                self.check()
                self.place()
                client = link.client()
            except SuspectError:
                outcome = "suspect"
            except StageUnavailableError:
                outcome = "no_replica"
        self.lost_jobs.n[left.stage, outcome] += 1
        if client is None:
            log.error("job_lost turn=%s at=%s outcome=%s", self.turn_id, left.name, outcome)
            raise lost
        self._made_in.add(left.stage)
        self._left_host = host
        log.warning("job_moved turn=%s from=%s to=%s", self.turn_id, left.name, link.replica.name)
        return client


@dataclass(eq=False)
class MovableJob:
    """A turn's job in one stage. An asynchronous context manager, as the Job that it has there.

    Its reader alone learns of a loss, and makes the move: while it reads, input that cannot be sent
    is kept, and all of it is sent again.

    Attributes:
        stays: why the job cannot go on in another replica at present. "": it can.
    """

    _link: Link
    job_id: str
    _move: Move = NO_MOVE
    stays: str = ""
    # What was done with the job so far, to be done again: opening it, and sending its input.
    _steps: list[Callable[[Job], Awaitable[None]]] = field(default_factory=list)
    _n_done: int = 0
    _doing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _again: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._jobs = AsyncExitStack()
        self._job = self._opened(self._link.client())

    def _opened(self, client: StageClient) -> Job:
        self._at = self._link.replica.spec
        job = client.open(self.job_id)
        self._jobs.push_async_exit(job)
        return job

    async def __aenter__(self) -> "MovableJob":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)
        await self._jobs.aclose()

    @property
    def known(self) -> set[str]:
        """Keys of items that the stage's process has."""
        return self._link.known

    @property
    def cancelled(self) -> bool:
        return self._job.cancelled

    async def begin(self, opener: Callable[[Job], Awaitable[None]]) -> None:
        """Open the job in the stage.

        Args:
            opener: begins the given job, for what is left to do. Called again after a loss.
        """
        self._steps = [opener]
        self._n_done = 0
        await self._do_steps()

    async def send(self, message: AnyMessage) -> None:
        """Send more input, and keep it. It is dropped once the stage has ended the job."""
        self._steps.append(lambda job: job.send(message))
        await self._do_steps()

    def again(self) -> None:
        """Open the job anew in its stage, where the earlier one ends, and send all input again."""
        self._n_done = 0
        self._again = asyncio.create_task(self._do_again(self._job), name="send again")

    async def answer(self, send: Callable[[Job], Awaitable[None]]) -> None:
        """Answer what the stage's process has asked; another one would ask again."""
        with suppress(StageUnavailableError):
            await send(self._job)

    def post(self, message: AnyMessage) -> None:
        """As send, without waiting or keeping it."""
        self._job.post(message)

    def cancel(self) -> None:
        """Stop the job in its stage now. Its events end, and later input is dropped."""
        self._job.cancel()

    async def events(
        self, *until: type, silence_limit_s: float | None = None
    ) -> AsyncGenerator[tuple[AnyMessage, list[bytes]], None]:
        """As Job.events, of one replica after the other.

        Raises:
            StageFailedError, DeadlineError: see Job.events.
            StageUnavailableError: the job is lost.
        """
        while True:
            events = self._job.events(*until, silence_limit_s=silence_limit_s)
            try:
                async with aclosing(events):
                    async for event in events:
                        yield event
                return
            except StageUnavailableError as lost:
                self._go_on(self._move.make(self._link, self._at, self.stays, lost))

    def _go_on(self, client: StageClient) -> None:
        self._job = self._opened(client)
        # Beside the reader: a stage whose output is not read does not read its input.
        self.again()

    async def _do_again(self, job: Job) -> None:
        try:
            await self._do_steps()
        except Exception as error:
            job.fail(error)  # for the reader

    async def _do_steps(self) -> None:
        async with self._doing:
            while self._n_done < len(self._steps):
                step = self._steps[self._n_done]
                self._n_done += 1  # a move during the step begins with the first one again
                with suppress(StageUnavailableError):
                    await step(self._job)
