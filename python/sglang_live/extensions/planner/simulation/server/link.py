"""Messages between the orchestrator and a simulated stage: the same ones, late, and not encoded.

In: messages of the orchestrator's jobs, and of the stage's. Out: the same, in order, at the other
end. Owner: one StageLink per process of a stage, which has the stage's end of each job.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_live.core import HistoryItem
from sglang_live.errors import LiveError
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.messages import (
    STREAMED,
    AnyMessage,
    Cancel,
    CloseSession,
    Credit,
    Failed,
    Opener,
    SessionHint,
)
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.client import JobClient
from sglang_live.stages.transport.queues import WINDOW, ReceiveCount


@dataclass(frozen=True, slots=True)
class Hops:
    """Seconds that a message takes to a stage, and from it."""

    to_stage_s: float
    from_stage_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a message: its tokens, audio_s of them a clip."""

    n_tokens: int
    audio_s: float = 0.0


class StageLink(JobClient):
    """The orchestrator's end. stalled_until_s: nothing arrives before, in either direction."""

    def __init__(self, stage: "SimulatedStage", events: Events, hops: Hops):
        super().__init__(stage.name)
        self._stage = stage
        self._events = events
        self._hops = hops
        self._unsent: list[AnyMessage] = []
        self._unsent_at_s = -1.0
        self.stalled_until_s = 0.0
        stage.link = self

    def tensors(self) -> wire.TensorFrames:
        return wire.TensorFrames(same_host=False)

    async def send(self, message: AnyMessage, tensors: wire.TensorFrames | None = None) -> None:
        if self._down is not None:
            raise self._down
        self.send_later(message)

    def send_later(self, message: AnyMessage) -> None:
        if self._down is None:
            due_s = self._due_s(self._hops.to_stage_s)
            self._events.at(due_s, partial(self._stage.receive, message))

    def answer(self, message: AnyMessage) -> None:
        """The stage sends a message. Those of one moment arrive together."""
        now_s = self._events.now_s()
        if not self._unsent or self._unsent_at_s != now_s:
            self._unsent, self._unsent_at_s = [], now_s
            due_s = self._due_s(self._hops.from_stage_s)
            self._events.at(due_s, partial(self._arrived, self._unsent))
        self._unsent.append(message)

    def _due_s(self, hop_s: float) -> float:
        return max(self._events.now_s() + hop_s, self.stalled_until_s)

    def _arrived(self, messages: list[AnyMessage]) -> None:
        # One that is sent at this very moment comes in a list of its own.
        if messages is self._unsent:
            self._unsent = []
        if self._down is None:
            for message in messages:
                self.receive(message, [])


class StageJob:
    """The stage's end of a job. is_over: it has ended, or was cancelled."""

    def __init__(self, stage: "SimulatedStage", opener: Opener):
        self.job_id = opener.job_id
        self.is_over = self._ends = False
        self._stage = stage
        self._left = WINDOW
        self._held: deque[AnyMessage] = deque()
        self._count = ReceiveCount()

    def send(self, message: AnyMessage) -> None:
        """As ServedJob: streamed messages wait for credit, and those behind them with them."""
        self._held.append(message)
        self._send_held()

    post = send

    def end(self, message: AnyMessage) -> None:
        """The last message."""
        self._ends = True
        self.send(message)

    def fail(self, error: LiveError) -> None:
        self._held.clear()
        self.end(Failed(self.job_id, error.code, str(error)))

    def receive(self, message: AnyMessage) -> None:
        if isinstance(message, Credit):
            self._left += message.n
            self._send_held()
            return
        if isinstance(message, STREAMED) and (n := self._count.took_one()):
            self._stage.link.answer(Credit(self.job_id, n))
        self.take(message)

    def take(self, message: AnyMessage) -> None:
        """More input of the job."""

    def cancel(self) -> None:
        """The orchestrator does not want it any more."""

    def _send_held(self) -> None:
        while self._held:
            if isinstance(self._held[0], STREAMED):
                if not self._left:
                    return
                self._left -= 1
            self._stage.link.answer(self._held.popleft())
        if self._ends:
            self.is_over = True
            self._stage.forget(self)


class SimulatedStage:
    """
    Attributes:
        jobs: open ones, by id.
        is_dead: the process has died.
    """

    link: StageLink

    def __init__(self, name: str):
        self.name = name
        self.jobs: dict[str, StageJob] = {}
        self.is_dead = False

    def begin(self, opener: Opener) -> StageJob:
        """Begin a job."""
        raise NotImplementedError

    def close_session(self, session_id: str) -> None:
        """Free what the stage holds of it."""

    def hint(self, hint: SessionHint) -> None:
        """A stage may plan with it."""

    def resume(
        self, session_id: str, items: Sequence[HistoryItem], sizes: Mapping[str, Sizes]
    ) -> None:
        """The session has been going on for a while: the stage holds these messages of it."""

    @property
    def held(self) -> dict[str, int]:
        """Numbers of what it holds, by name."""
        return {"jobs": len(self.jobs)}

    def die(self) -> None:
        self.is_dead = True

    def forget(self, job: StageJob) -> None:
        if self.jobs.get(job.job_id) is job:
            del self.jobs[job.job_id]

    def receive(self, message: AnyMessage) -> None:
        """As StageServer."""
        if self.is_dead:
            return
        job = self.jobs.get(message.job_id)
        if isinstance(message, CloseSession):
            self.close_session(message.session_id)
        elif isinstance(message, SessionHint):
            self.hint(message)
        elif isinstance(message, Opener):
            if job is not None:
                self._cancel(job)
            self.jobs[message.job_id] = self.begin(message)
        elif job is None:
            pass  # it is over; its peer sent this before it received the end
        elif isinstance(message, Cancel):
            self._cancel(job)
        else:
            job.receive(message)

    def _cancel(self, job: StageJob) -> None:
        job.is_over = True
        self.forget(job)
        job.cancel()
