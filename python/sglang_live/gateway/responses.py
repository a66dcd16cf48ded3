"""The responses of one session: at most one in the conversation, a few beside it.

In: ResponsePlan, cancel, interrupt. Out: turns asked of the orchestrator, server events.
Owner: one Responses per connection. Each response is a task; ending one is immediate for the
client (response.done goes out at once), while its turn winds down in the background and the
next turn waits for that.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.clock import Clock
from sglang_live.errors import DeadlineError, LiveError, StageFailedError
from sglang_live.gateway.conversation import Conversation
from sglang_live.gateway.event_error import ClientEventError, internal_error
from sglang_live.gateway.outbox import Emit
from sglang_live.gateway.response import ResponsePlan, ResponseWriter
from sglang_live.orchestrator.history import AudioDelta, TranscriptDelta, TurnDone, TurnRequest
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# A client that vanished must be forgotten within 2 s; the session's own close needs some of it.
_WIND_DOWN_S = 1.0
# A cancelled turn that is stuck must fail the next one instead of keeping it waiting for ever.
_PREDECESSOR_S = 10.0


@dataclass(eq=False, slots=True)
class _Run:
    plan: ResponsePlan
    writer: ResponseWriter
    task: asyncio.Task[None] | None = None
    first_audio_at_s: float | None = None
    settled: bool = False


@dataclass(eq=False)
class Responses:
    """Who is answering, what waits, and what the session is asked.

    voices: names the model knows; the first is the default.
    on_done: told how many seconds of a finished reply the caller still has to hear.
    has_spoken: some audio went out in this session.
    """

    session: VoiceSession
    conversation: Conversation
    emit: Emit
    voices: tuple[str, ...]
    clock: Clock
    metrics: GatewayMetrics
    max_side_responses: int
    on_done: Callable[[float], None] = lambda playout_left_s: None
    has_spoken: bool = False

    def __post_init__(self):
        self._main: _Run | None = None
        self._side: dict[str, _Run] = {}
        self._queued: ResponsePlan | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._main_tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """A response writes to the conversation."""
        return self._main is not None

    def create(self, plan: ResponsePlan) -> None:
        """Raises ClientEventError if the conversation, or the side, is busy."""
        if plan.in_conversation and self._main:
            raise ClientEventError(
                "Conversation already has an active response in progress: "
                f"{self._main.plan.response_id}. Wait until the response is finished before "
                "creating a new one.",
                code="conversation_already_has_active_response",
            )
        if not plan.in_conversation and len(self._side) >= self.max_side_responses:
            raise ClientEventError(
                f"At most {self.max_side_responses} responses outside the conversation at once.",
                code="too_many_responses",
            )
        self._start(plan)

    def create_when_idle(self, plan: ResponsePlan) -> None:
        """Answer a spoken turn. With interrupt_response off, an older answer may still run."""
        if self._main:
            self._queued = plan
        else:
            self._start(plan)

    def cancel(self, response_id: str | None) -> None:
        """Raises ClientEventError if there is nothing to cancel."""
        run = self._main
        if response_id is not None and (run is None or run.plan.response_id != response_id):
            run = self._side.get(response_id)
        if run is None:
            # One client recognises the harmless case by the first two words.
            raise ClientEventError(
                "Cancellation failed: no active response found.",
                code="response_cancel_not_active",
            )
        self._cancel(run, "client_cancelled")

    def interrupt(self) -> None:
        """The caller speaks: end the answer, and forget one that has not begun."""
        self._queued = None
        if self._main:
            sent_ms = self._main.writer.sent_audio_s * 1000
            log.info("barge_in response=%s sent_ms=%d", self._main.plan.response_id, sent_ms)
            self._cancel(self._main, "turn_detected")

    async def close(self) -> None:
        """Cancel everything and wait until the orchestrator has let go, within bounds."""
        self._queued = None
        for run in (self._main, *self._side.values()):
            if run:
                self._cancel(run, "client_cancelled")
        for _ in range(2):
            if not self._tasks:
                return
            await asyncio.wait(self._tasks, timeout=_WIND_DOWN_S / 2)
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            log.error("turns_stuck session=%s n=%d", self.session.session_id, len(self._tasks))

    def _start(self, plan: ResponsePlan) -> None:
        run = _Run(plan, ResponseWriter(plan, self.conversation, self.emit))
        predecessors = frozenset(self._main_tasks) if plan.in_conversation else frozenset()
        run.task = asyncio.create_task(self._run(run, predecessors))
        self._tasks.add(run.task)
        run.task.add_done_callback(self._tasks.discard)
        if plan.in_conversation:
            self._main = run
            self._main_tasks.add(run.task)
            run.task.add_done_callback(self._main_tasks.discard)
        else:
            self._side[plan.response_id] = run
        self.metrics.responses_active.inc()
        run.writer.create()

    def _cancel(self, run: _Run, reason: str) -> None:
        run.writer.cancel(reason)
        self._settle(run)
        assert run.task is not None
        run.task.cancel()

    async def _run(self, run: _Run, predecessors: frozenset[asyncio.Task[None]]) -> None:
        try:
            if predecessors:
                # The session takes one turn at a time; a cancelled one may still be winding down.
                await self._until_ended(predecessors)
            await self._produce(run)
        except LiveError as error:
            log.warning("turn_failed response=%s code=%s", run.plan.response_id, error.code)
            run.writer.fail(error)
        except Exception:
            log.exception("turn_crashed response=%s", run.plan.response_id)
            run.writer.fail(internal_error())
        finally:
            # After our own cancel this changes nothing; otherwise the server is going down.
            run.writer.cancel("client_cancelled")
            self._settle(run)

    async def _until_ended(self, turns: frozenset[asyncio.Task[None]]) -> None:
        _, stuck = await asyncio.wait(turns, timeout=_PREDECESSOR_S)
        if stuck:
            raise DeadlineError("The turn before this one does not end.")

    async def _produce(self, run: _Run) -> None:
        run.writer.place_after(self.conversation.last_id)
        events = self.session.respond(self._turn(run.plan))
        try:
            async for event in events:
                if isinstance(event, AudioDelta):
                    self._add_audio(run, event.pcm)
                elif isinstance(event, TranscriptDelta):
                    run.writer.add_transcript(event.text)
                elif isinstance(event, TurnDone):
                    for mark, at_s in event.trace.items():
                        self.metrics.turn_marks_s.labels(mark).observe(at_s)
                    run.writer.complete(event)
                    self._settle(run)
        finally:
            close = getattr(events, "aclose", None)
            if close:
                await close()
        if not run.writer.done:
            raise StageFailedError("The turn ended without a result.")

    def _turn(self, plan: ResponsePlan) -> TurnRequest:
        config = plan.config
        if plan.context is None:
            history = self.conversation.history()
        else:
            history = tuple(seen for item in plan.context if (seen := item.history()))
        known = config.voice in self.voices or not self.voices
        return TurnRequest(
            turn_id=plan.response_id,
            instructions=config.instructions,
            history=history,
            voice=config.voice if known else self.voices[0],
            wants_audio=config.output_modalities == ("audio",),
            max_output_tokens=config.max_output_tokens,
            temperature=config.temperature,
            # Another context than the conversation must not replace it in the session's KV.
            stateless=not plan.in_conversation or plan.context is not None,
        )

    def _add_audio(self, run: _Run, pcm: bytes) -> None:
        first = run.first_audio_at_s is None
        on_sent = (lambda: self._observe_ttfp(run.plan)) if first else None
        if run.writer.add_audio(pcm, on_sent) and first:
            run.first_audio_at_s = self.clock.now_s()
            self.has_spoken = True

    def _observe_ttfp(self, plan: ResponsePlan) -> None:
        now_s = self.clock.now_s()
        self.metrics.ttfp_from_decision_s.observe(now_s - plan.decided_at_s)
        if plan.speech_end_at_s is not None:
            self.metrics.ttfp_from_speech_end_s.observe(now_s - plan.speech_end_at_s)

    def _settle(self, run: _Run) -> None:
        """The response is over for the client; its place is free."""
        if run.settled:
            return
        run.settled = True
        self.metrics.responses_active.dec()
        self.metrics.turns.labels(run.writer.status, run.writer.reason or "").inc()
        if self._main is not run:
            self._side.pop(run.plan.response_id, None)
            return
        self._main = None
        self.on_done(self._playout_left_s(run))
        if self._queued:
            plan, self._queued = self._queued, None
            self._start(plan)

    def _playout_left_s(self, run: _Run) -> float:
        if run.first_audio_at_s is None:
            return 0.0
        playing_s = self.clock.now_s() - run.first_audio_at_s
        return max(0.0, run.writer.sent_audio_s - playing_s)
