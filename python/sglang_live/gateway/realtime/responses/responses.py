"""The responses of one session: at most one in the conversation, a few beside it.

In: ResponsePlan, cancel, interrupt. Out: turns asked for and ended, server events.
Owner: one Responses per connection. Ending a response is immediate for the client: when
cancel() or interrupt() returns, response.done is out.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.clock import Clock
from sglang_live.gateway.draining import DrainingError
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.rate_limits import OutOfBandSlots, RateLimitError, RateLimitStatus
from sglang_live.gateway.realtime.conversation.events import ConversationEvents
from sglang_live.gateway.realtime.outbox import Emit, Outbox
from sglang_live.gateway.realtime.responses.plan import ResponsePlan
from sglang_live.gateway.realtime.responses.playout import Answer, Playout
from sglang_live.gateway.realtime.responses.turn_runner import Run, Turns
from sglang_live.gateway.realtime.responses.writer import ResponseWriter
from sglang_live.gateway.realtime.session_config import SessionConfig
from sglang_live.gateway.realtime.turns.frame_mode import FrameMode
from sglang_live.gateway.realtime.turns.turn_prefill import Pieces
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics


@dataclass(eq=False)
class Responses:
    """Who is answering, and what waits.

    voices: names the model knows; the first is the default.
    cache_salt: of the owner (gateway/owner.py).
    may_ask: counts one more answer, and says how many are left; raises RateLimitError, or
        DrainingError.
    on_done: told how many seconds of a finished reply the caller still has to hear.
    has_spoken: some audio went out in this session.
    nobody_waits: set while no answer in the conversation is still without a sound.
    """

    session: VoiceSession
    items: ConversationEvents
    outbox: Outbox
    playout: Playout
    monitor: SessionMonitor
    voices: tuple[str, ...]
    clock: Clock
    metrics: GatewayMetrics
    max_out_of_band_responses: int
    out_of_band_slots: OutOfBandSlots
    cache_salt: str
    may_ask: Callable[[], RateLimitStatus | None]
    on_done: Callable[[float], None] = lambda playout_left_s: None
    has_spoken: bool = False

    def __post_init__(self):
        self.nobody_waits = asyncio.Event()
        self.nobody_waits.set()
        self._main: Run | None = None
        self._side: dict[str, Run] = {}
        self._queued: ResponsePlan | None = None
        self._turns = Turns(
            session=self.session,
            items=self.items,
            playout=self.playout,
            monitor=self.monitor,
            voices=self.voices,
            clock=self.clock,
            metrics=self.metrics,
            cache_salt=self.cache_salt,
            settle=self._settle,
        )

    @property
    def busy(self) -> bool:
        """A response writes to the conversation."""
        return self._main is not None

    @property
    def at_work(self) -> bool:
        """An answer is being made, or is to be, or is still heard."""
        return bool(self._main or self._side or self._queued) or self.audible

    @property
    def audible(self) -> bool:
        return self.playout.audible

    def create(self, plan: ResponsePlan) -> None:
        """
        Raises:
            ClientEventError: the conversation, or the side, is busy.
            RateLimitError: there were too many answers.
            DrainingError: the server is about to stop.
        """
        if plan.in_conversation and self._main:
            raise ClientEventError(
                "Conversation already has an active response in progress: "
                f"{self._main.plan.response_id}. Wait until the response is finished before "
                "creating a new one.",
                code="conversation_already_has_active_response",
            )
        if not plan.in_conversation and len(self._side) >= self.max_out_of_band_responses:
            raise ClientEventError(
                f"At most {self.max_out_of_band_responses} out-of-band responses at once.",
                code="too_many_responses",
            )
        if not plan.in_conversation and self.out_of_band_slots.full:
            raise ClientEventError(
                "Too many responses outside conversations at once; try again later.",
                code="too_many_responses",
            )
        self._start(plan, self.may_ask())

    def create_when_idle(self, plan: ResponsePlan) -> None:
        """Answer a spoken turn. With interrupt_response off, an older answer may still run."""
        if self._main:
            self._queued = plan
        else:
            self._answer(plan)

    def prefill_turn(self, config: SessionConfig, pieces: Pieces) -> bool:
        """What is being said, before it is answered. False: not now."""
        return self._turns.prefill_turn(config, pieces)

    def speculate(self, config: SessionConfig, said: Pieces) -> bool:
        """The caller may be done: begin to answer, for nobody yet. False: not now."""
        return self._turns.speculate(config, said)

    @property
    def speculated(self) -> Pieces:
        """What was said, if an answer to it has begun for nobody yet."""
        return self._turns.speculated

    def withdraw_speculative(self) -> None:
        """The caller was not done. Nothing happens if there is no guess."""
        self._turns.withdraw_speculative()

    def frame_turns(self, emit: Emit, config: Callable[[], SessionConfig]) -> FrameMode:
        """For a caller of this conversation who is heard in frames. config: the settings now."""
        turns = self._turns
        return FrameMode(
            self.session,
            emit,
            self.clock,
            self.metrics,
            lambda: turns.request(config()),
            turns.until_idle,
            self.may_ask,
        )

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

    def hold(self) -> None:
        self.playout.hold()

    def release(self) -> None:
        self.playout.release()

    def interrupt(self) -> None:
        """The caller speaks: end the answer, even one that only plays out, and what waits."""
        self._queued = None
        if self._main:
            self._cancel(self._main, "turn_detected")
        self.playout.interrupt()

    async def close(self) -> None:
        """Cancel everything and wait until the orchestrator has let go, within bounds."""
        self._queued = None
        for run in (self._main, *self._side.values()):
            if run:
                run.writer.cancel("client_cancelled")
                self._settle(run)
        await self._turns.close()

    def _answer(self, plan: ResponsePlan) -> None:
        """Nobody asked in so many words, so nobody would read an error: the answer fails."""
        try:
            self._start(plan, self.may_ask())
        except (RateLimitError, DrainingError) as error:
            self.withdraw_speculative()
            writer = ResponseWriter(plan, self.items.conversation, self.outbox.emit)
            writer.create()
            writer.fail(error)
            self.metrics.turns.labels(writer.status, writer.reason).inc()

    def _start(self, plan: ResponsePlan, left: RateLimitStatus | None) -> None:
        writer = ResponseWriter(
            plan,
            self.items.conversation,
            self.outbox.emit,
            on_audio_sent=lambda duration_s: self._on_audio_sent(run, duration_s),
            frames_per_token=self.monitor.user_stats.frames_per_token,
        )
        run = Run(plan, writer)
        if plan.in_conversation:
            run.answer = Answer(self.monitor.response_created(plan.response_id), writer)
            self.playout.add(run.answer)
            self._main = run
            self.nobody_waits.clear()
        else:
            self._side[plan.response_id] = run
            self.out_of_band_slots.take()
        self._turns.start(run)
        self.metrics.responses_active.inc()
        writer.create()
        if left is not None:
            self.outbox.emit("rate_limits.updated", rate_limits=left.to_json())

    def _cancel(self, run: Run, reason: str) -> None:
        self.playout.discard(run.plan.response_id)
        run.writer.cancel(reason)
        if run.answer and reason == "client_cancelled":
            self.playout.cancel(run.answer)
        self._settle(run)
        self._turns.end(run)

    def _settle(self, run: Run) -> None:
        """The response is over for the client; its place is free."""
        if run.settled:
            return
        run.settled = True
        self.metrics.responses_active.dec()
        self.metrics.turns.labels(run.writer.status, run.writer.reason or "").inc()
        if run.answer is None:
            self._side.pop(run.plan.response_id, None)
            self.out_of_band_slots.release()
            return
        self._main = None
        self.nobody_waits.set()
        self.monitor.response_done(run.answer.reply, run.writer.status)
        self.playout.check_all_sent(run.answer)
        self.items.drop_oldest_if_full()
        self.on_done(self._playout_left_s(run))
        if self._queued:
            plan, self._queued = self._queued, None
            self._answer(plan)

    def _on_audio_sent(self, run: Run, duration_s: float) -> None:
        if not run.sounded:
            run.sounded = self.has_spoken = True
            self._observe_ttfp(run.plan)
        if run.answer:
            self.nobody_waits.set()
            self.playout.sent(run.answer, duration_s)

    def _observe_ttfp(self, plan: ResponsePlan) -> None:
        now_s = self.clock.now_s()
        self.metrics.ttfp_from_decision_s.observe(now_s - plan.decided_at_s)
        if plan.speech_end_at_s is not None:
            self.metrics.ttfp_from_speech_end_s.observe(now_s - plan.speech_end_at_s)

    def _playout_left_s(self, run: Run) -> float:
        if run.answer is None or run.writer.status == "cancelled":
            return 0.0
        heard_s = run.answer.reply.playback.heard_s(self.clock.now_s())
        return max(0.0, run.writer.made_audio_s - heard_s)
