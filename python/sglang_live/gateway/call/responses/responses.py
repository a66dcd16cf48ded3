"""The responses of one session: at most one in the conversation, a few out of band.

In: ResponsePlan, cancel, interrupt. Out: turns started and ended.
Owner: one Responses per connection. For the client a response ends at once: when cancel() or
interrupt() returns, the port knows that it is done.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sglang_live.aio import close_all
from sglang_live.errors import LiveError
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.changes import ConversationChanges
from sglang_live.gateway.call.conversation.items import FunctionCallItem
from sglang_live.gateway.call.ports import ResponsePort
from sglang_live.gateway.call.responses.audible import AudibleResponses
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.responses.turn_runner import TurnRunner
from sglang_live.gateway.call.responses.writer import ActiveResponse, ResponseWriter
from sglang_live.gateway.draining import DrainingError
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitError, RateLimitStatus
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.playback import PlaybackClock, ResponsePlayback


class GatewayLostError(LiveError):
    """What a response was made of went with the gateway that made it."""

    code = "server_lost"
    http_status = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """The latest response of another gateway.

    plan: with what has come of it. item, calls: its items. after_id: see ResponseWriter.after_id.
    status: "in_progress": it is made further; "lost": it cannot be.
    heard_s: what the client has heard of it.
    n_known: characters of its text that the client has got.
    lacks_creation, lacks_item, lacks_end: whether the client may not know that it was created, that
        its item was, and that it is done.
    """

    plan: ResponsePlan
    item: AssistantItem | None
    calls: tuple[FunctionCallItem, ...]
    after_id: str | None
    status: str
    reason: str | None
    heard_s: float
    n_known: int
    lacks_creation: bool
    lacks_item: bool
    lacks_end: bool

    @property
    def is_over(self) -> bool:
        """Whether it was made to its end."""
        return self.status not in ("in_progress", "lost")

    @property
    def open_item(self) -> AssistantItem | None:
        """Its item, if that is not complete."""
        return None if self.is_over else self.item

    @property
    def said(self) -> str:
        return self.plan.begun.said if self.plan.begun else ""

    @property
    def n_said(self) -> int:
        """Tokens of that."""
        return len(self.plan.begun.ids) if self.plan.begun else 0


@dataclass(eq=False)
class Responses:
    """
    admit: counts one more response against the limits, and returns what is left of them; raises
        RateLimitError or DrainingError.
    on_done: called when a response in the conversation is done, with the seconds of it that the
        user will still hear.
    has_spoken: some audio was sent in this session.
    latest: the newest response in the conversation; None: there was none.
    past_first_audio: cleared while a response in the conversation has not sent any audio yet.
    """

    parts: GatewayParts
    changes: ConversationChanges
    port: ResponsePort
    audible: AudibleResponses
    monitor: SessionMonitor
    turn_runner: TurnRunner
    admit: Callable[[], RateLimitStatus | None]
    on_done: Callable[[float], None] = lambda unheard_s: None
    has_spoken: bool = False
    latest: ActiveResponse | None = None

    def __post_init__(self) -> None:
        self._metrics = self.parts.metrics
        self.past_first_audio = asyncio.Event()
        self.past_first_audio.set()
        self._active: ActiveResponse | None = None
        self._out_of_band: dict[str, ActiveResponse] = {}
        self._queued: ResponsePlan | None = None

    @property
    def busy(self) -> bool:
        """Whether a response in the conversation is being made."""
        return self._active is not None

    @property
    def at_work(self) -> bool:
        """Whether a response is being made, waits, or is still heard."""
        return bool(self._active or self._out_of_band or self._queued) or self.audible.any

    def create(self, plan: ResponsePlan) -> None:
        """
        Raises:
            ClientEventError: a response in the conversation is being made, or there are too many
                out-of-band responses.
            RateLimitError: the owner has created too many responses.
            DrainingError: the server is shutting down.
        """
        if plan.in_conversation and self._active:
            if self._active.is_moved and self._queued is None:
                # The client may have got its end from the gateway before, and not get it again.
                self._queued = plan
                return
            raise ClientEventError(
                f"Conversation already has an active response in progress: {self._active.id}. "
                "Wait until the response is finished before creating a new one.",
                code="conversation_already_has_active_response",
            )
        most = self.parts.config.sessions.max_out_of_band_responses
        if not plan.in_conversation and len(self._out_of_band) >= most:
            raise ClientEventError(
                f"At most {most} out-of-band responses at once.",
                code="too_many_responses",
            )
        if not plan.in_conversation and self.parts.out_of_band_slots.full:
            raise ClientEventError(
                "Too many out-of-band responses of all sessions at once; try again later.",
                code="too_many_responses",
            )
        self._start(plan, self.admit())

    def go_on(self, unfinished: Unfinished) -> None:
        """Take over the latest response of another gateway: to make it, or to follow its playback
        to the end. Its items are in the conversation."""
        response = self._made(unfinished.plan)
        response.is_moved = True
        writer, item, now_s = response.writer, unfinished.item, self.parts.clock.now_s()
        writer.place_after(unfinished.after_id)
        if unfinished.is_over:
            writer.restore(unfinished.status, unfinished.reason, item, unfinished.calls)
        else:
            writer.go_on(item, unfinished.heard_s)
        sent_s = writer.made_audio_s if unfinished.is_over else unfinished.heard_s
        response.playback.clock.go_on(sent_s, min(sent_s, unfinished.heard_s), now_s)
        response.audio_started = sent_s > 0
        self.audible.add(response)
        self.latest = response
        if unfinished.lacks_creation:
            writer.create()
        if unfinished.is_over:
            response.settled = True
            self.audible.check_all_sent(response)
            if unfinished.lacks_end:
                self.port.response_done(writer)
            return
        self._active = response
        self.past_first_audio.clear()
        self._metrics.responses_active.inc()
        if item is not None and unfinished.lacks_item:
            self.port.item_opened(writer, item, self.changes.conversation.id_before(item))
        if item is not None and (text := unfinished.said[unfinished.n_known :]):
            self.port.text_added(writer, item, text)
        elif item is None:
            writer.add_transcript(unfinished.said, unfinished.n_said)
        if unfinished.status == "lost":
            writer.fail(GatewayLostError("The server that made this response is lost."))
            response.settle()
        else:
            self.turn_runner.go_on(response)

    def create_when_idle(self, plan: ResponsePlan) -> None:
        """Respond to a user turn; after the active response, which runs on if interrupt_response
        is off."""
        if self._active:
            self._queued = plan
        else:
            self._start_or_fail(plan)

    def cancel(self, response_id: str | None) -> None:
        """
        Args:
            response_id: None: the one in the conversation.
        Raises:
            ClientEventError: there is nothing to cancel.
        """
        response = self._active
        if response_id is not None and (response is None or response.id != response_id):
            response = self._out_of_band.get(response_id)
        if response is None:
            # One client recognises this harmless error by the first two words of the message.
            raise ClientEventError(
                "Cancellation failed: no active response found.",
                code="response_cancel_not_active",
            )
        self._end(response, "client_cancelled")

    def interrupt(self) -> None:
        """The user speaks: end the active response, the one that waits, and all playback."""
        self._queued = None
        if self._active:
            self._end(self._active, "turn_detected")
        self.audible.interrupt()

    async def close(self) -> None:
        """Cancel everything and wait, within bounds, until all turns have ended."""
        self._queued = None
        ends = [
            partial(end, *why)
            for response in (self._active, *self._out_of_band.values())
            if response
            for end, why in ((response.writer.cancel, ("client_cancelled",)), (response.settle, ()))
        ]
        await close_all(*ends, self.turn_runner.close)

    def _start_or_fail(self, plan: ResponsePlan) -> None:
        """Report a refusal in a failed response: no client event asked for it, so an error event
        would have nothing to refer to."""
        try:
            self._start(plan, self.admit())
        except (RateLimitError, DrainingError) as error:
            self.turn_runner.withdraw_speculative()
            writer = ResponseWriter(plan, self.changes.conversation, self.port)
            writer.create()
            writer.fail(error)
            self._metrics.turns.labels(writer.status, writer.reason).inc()

    def _start(self, plan: ResponsePlan, limits: RateLimitStatus | None) -> None:
        response = self._made(plan)
        if plan.in_conversation:
            self.audible.add(response)
            self._active = self.latest = response
            self.past_first_audio.clear()
        else:
            self._out_of_band[response.id] = response
            self.parts.out_of_band_slots.take()
        self.turn_runner.start(response)
        self._metrics.responses_active.inc()
        response.writer.create()
        if limits is not None:
            self.port.limits_changed(limits)

    def _made(self, plan: ResponsePlan) -> ActiveResponse:
        """A response that has not begun."""
        writer = ResponseWriter(
            plan,
            self.changes.conversation,
            self.port,
            on_audio_sent=lambda frame, duration_s: self._on_audio_sent(
                response, frame, duration_s
            ),
            frames_per_token=self.monitor.user_stats.frames_per_token,
        )
        if plan.in_conversation:
            playback = self.monitor.response_created(plan.response_id, plan.config.speed)
        else:
            playback = ResponsePlayback(response_id=plan.response_id, clock=PlaybackClock())
        response = ActiveResponse(plan, writer, playback, self._on_settled)
        return response

    def _end(self, response: ActiveResponse, reason: str) -> None:
        self.audible.discard(response.id)
        response.writer.cancel(reason)
        if response.in_conversation and reason == "client_cancelled":
            self.audible.cancel(response)
        response.settle()
        self.turn_runner.end(response)

    def _on_settled(self, response: ActiveResponse) -> None:
        """The response is over for the client: the next one may start."""
        writer = response.writer
        self._metrics.responses_active.dec()
        self._metrics.turns.labels(writer.status, writer.reason or "").inc()
        if not response.in_conversation:
            self._out_of_band.pop(response.id, None)
            self.parts.out_of_band_slots.release()
            return
        self._active = None
        self.past_first_audio.set()
        self.monitor.response_done(response.playback, writer.status)
        self.audible.check_all_sent(response)
        self.changes.drop_oldest_if_full()
        self.on_done(response.unheard_s(self.parts.clock.now_s()))
        if self._queued:
            plan, self._queued = self._queued, None
            self._start_or_fail(plan)

    def _on_audio_sent(self, response: ActiveResponse, frame: bytes, duration_s: float) -> None:
        if not response.audio_started:
            response.audio_started = True
            self.has_spoken = True
            self._observe_ttfp(response.plan)
        if response.in_conversation:
            self.past_first_audio.set()
            self.audible.audio_sent(response, frame, duration_s)

    def _observe_ttfp(self, plan: ResponsePlan) -> None:
        now_s = self.parts.clock.now_s()
        self._metrics.ttfp_from_decision_s.observe(now_s - plan.decided_at_s)
        if plan.speech_end_at_s is not None:
            self._metrics.ttfp_from_speech_end_s.observe(now_s - plan.speech_end_at_s)
