"""The turns of one session's responses.

In: ActiveResponse. Out: a task for each turn; its events go to the response's writer.
Owner: one TurnRunner per connection. For the client a response ends at once; its turn winds down
here in the background, and the next turn of the conversation waits for that.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from sglang_live.core import (
    OUTPUT_RATE_HZ,
    AudioDelta,
    HistoryItem,
    TextDone,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
    Usage,
)
from sglang_live.errors import DeadlineError, LiveError, StageFailedError
from sglang_live.gateway.auth import owner_salt
from sglang_live.gateway.call.conversation.changes import ConversationChanges
from sglang_live.gateway.call.conversation.items import Item, MessageItem
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.responses.speculation import SpeculativeTurn, Utterance
from sglang_live.gateway.call.responses.writer import ActiveResponse
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.errors import internal_error
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.tools import read_calls, tools_of
from sglang_live.ids import new_id
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)

# A session must be free within 2 s of its client's end; closing it at the orchestrator takes some
# of that.
_WIND_DOWN_S = 1.0
# An interrupted turn ends within a round or two of its stages; after this time it is cancelled.
_INTERRUPT_S = 5.0
# If an ended turn is stuck, the next one fails after this time.
_PREDECESSOR_S = 10.0
_BYTES_PER_S = 2 * OUTPUT_RATE_HZ


@dataclass(eq=False)
class TurnRunner:
    """
    owner: of the session, for the cache's salt (gateway/auth.py).
    answers: whether there are responses.
    """

    parts: GatewayParts
    session: VoiceSession
    changes: ConversationChanges
    monitor: SessionMonitor
    owner: str
    answers: bool = True

    def __post_init__(self) -> None:
        self._metrics = self.parts.metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._conversation_tasks: set[asyncio.Task[None]] = set()
        self._deadlines: dict[ActiveResponse, asyncio.Task[None]] = {}
        self._speculative: SpeculativeTurn | None = None

    def go_on(self, response: ActiveResponse) -> None:
        """Start the turn of a response that another gateway has begun."""
        held = self.changes.conversation.items
        place = [n for n, item in enumerate(held) if item.id == response.writer.after_id]
        items = held[: place[0] + 1] if place else ()
        response.task = asyncio.create_task(self._run(response, items, frozenset(), None))
        self._keep(response.task, in_conversation=True)

    def start(self, response: ActiveResponse) -> None:
        plan = response.plan
        speculative, predecessors = None, frozenset[asyncio.Task[None]]()
        if plan.in_conversation:
            speculative = self._take_speculative(plan)
            own_task = {speculative.task} if speculative else set()
            predecessors = frozenset(self._conversation_tasks - own_task)
        # Items that the client adds from now on come after this response.
        items = self.changes.conversation.items
        response.writer.place_after(self.changes.conversation.last_id)
        response.task = asyncio.create_task(self._run(response, items, predecessors, speculative))
        self._keep(response.task, plan.in_conversation)

    def end(self, response: ActiveResponse) -> None:
        """End the turn of a response that is over. The session keeps what was generated, if the
        turn can be interrupted."""
        assert response.task is not None
        if response.turn_running and not response.plan.stateless and self.session.interrupt():
            self._deadlines[response] = asyncio.create_task(self._cancel_late(response))
        else:
            response.task.cancel()

    async def close(self) -> None:
        """Cancel all turns and wait, within bounds, until they have ended."""
        self.withdraw_speculative()
        for task in self._tasks:
            task.cancel()
        for _ in range(2):
            if not self._tasks:
                return
            await asyncio.wait(self._tasks, timeout=_WIND_DOWN_S / 2)
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            log.error("turns_stuck session=%s n=%d", self.session.session_id, len(self._tasks))

    async def until_idle(self) -> None:
        """Return when no turn of the conversation runs."""
        while self._conversation_tasks:
            await asyncio.wait(self._conversation_tasks)

    def request(self, config: SessionConfig) -> TurnRequest:
        """The request of a turn over the conversation as it is now."""
        return self._request(ResponsePlan(config=config, decided_at_s=self.parts.clock.now_s()))

    # --- before the end of the user's turn ---

    def prefill_turn(self, config: SessionConfig, utterance: Utterance) -> bool:
        """Prefill an utterance while the user still speaks; without one, the instructions and the
        conversation if their KV is not there. Returns False if a turn of the conversation runs, or
        the session refuses.

        Where nothing answers nothing is prefilled; a recogniser hears the utterance for its words.
        """
        if not self.answers:
            return self.parts.config.turns.prefills_at_pauses and bool(utterance)
        if self._conversation_tasks:
            return False
        request = self.request(config)
        history = (*request.history, *utterance)
        request = replace(request, history=history, prefill_only=True, preheat=not utterance)
        return self.session.prefill_turn(request)

    def speculate(self, config: SessionConfig, utterance: Utterance) -> None:
        """Start a speculative turn after what the user has said so far, if there is room."""
        refused = self.session.speculation_refused()
        if self._conversation_tasks or refused:
            self._metrics.speculations_refused.labels(refused or "turn_runs").inc()
            return
        request = self.request(config)
        history = (*request.history, *utterance)
        request = replace(request, history=history, speculative=True)
        self._speculative = SpeculativeTurn(self.session, request, utterance)
        self._keep(self._speculative.task, in_conversation=True)

    @property
    def speculated(self) -> Utterance:
        """The utterance of the speculative turn; () without one."""
        return self._speculative.utterance if self._speculative else ()

    def withdraw_speculative(self) -> None:
        """End the speculative turn, if there is one: the user's turn is not over."""
        speculative, self._speculative = self._speculative, None
        if speculative is not None:
            self._withdraw(speculative)

    def _withdraw(self, speculative: SpeculativeTurn) -> None:
        self._metrics.speculative_turns.labels("withdrawn").inc()
        speculative.withdraw()

    def _take_speculative(self, plan: ResponsePlan) -> SpeculativeTurn | None:
        """The speculative turn if it is the turn of this plan; otherwise it is withdrawn. One that
        failed before the user waited for it is no reason for the response to fail."""
        speculative = self._speculative
        if speculative is None:
            return None
        is_usable = not plan.stateless and not speculative.failed
        if not is_usable or not speculative.is_for(self._request(plan)):
            self.withdraw_speculative()
            return None
        self._speculative = None
        return speculative

    # --- one turn ---

    def _keep(self, task: asyncio.Task[None], in_conversation: bool) -> None:
        for tasks in (self._tasks, self._conversation_tasks) if in_conversation else (self._tasks,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _cancel_late(self, response: ActiveResponse) -> None:
        await self.parts.clock.sleep(_INTERRUPT_S)
        log.warning("turn_not_interrupted response=%s", response.id)
        assert response.task is not None
        response.task.cancel()

    async def _run(
        self,
        response: ActiveResponse,
        items: tuple[Item, ...],
        predecessors: frozenset[asyncio.Task[None]],
        speculative: SpeculativeTurn | None,
    ) -> None:
        try:
            if predecessors:
                # The session takes one turn at a time; an ended one may still be winding down.
                await self._until_ended(predecessors)
            await self._run_turn(response, items, speculative)
        except LiveError as error:
            log.warning("turn_failed response=%s code=%s", response.id, error.code)
            response.writer.fail(error)
        except Exception:
            log.exception("turn_crashed response=%s", response.id)
            response.writer.fail(internal_error())
        finally:
            response.turn_running = False
            if deadline := self._deadlines.pop(response, None):
                deadline.cancel()
            try:
                # Without effect after a cancellation of ours; otherwise the server shuts down.
                response.writer.cancel("client_cancelled")
            finally:
                response.settle()
                # With it go the items: AudibleResponses keeps the response for longer.
                response.task = None

    async def _until_ended(self, turns: frozenset[asyncio.Task[None]]) -> None:
        _, stuck = await asyncio.wait(turns, timeout=_PREDECESSOR_S)
        if stuck:
            raise DeadlineError("The turn before this one does not end.")

    async def _run_turn(
        self,
        response: ActiveResponse,
        items: tuple[Item, ...],
        speculative: SpeculativeTurn | None,
    ) -> None:
        plan = response.plan
        if plan.config.output_modalities == ("audio",):
            self.parts.voice_of(self.owner, plan.config.voice)  # it may have been deleted
        await _judge(plan.context or items)
        if _follows_silence(plan, items):
            if speculative is not None:
                self._withdraw(speculative)
            return self._finish(response, _empty_result())
        events: AsyncGenerator[TurnEvent, None]
        if speculative is not None:
            self._metrics.speculative_turns.labels("answered").inc()
            events = speculative.confirm()
        else:
            # Only now: the turns before this one have ended, so their items are complete.
            events = self.session.respond(self._request(plan, items))
        response.turn_running = True
        if not plan.stateless:
            self.monitor.turn_started(response.playback)
        ended = False
        try:
            async for event in events:
                self._handle(response, event)
                ended = ended or isinstance(event, TurnDone)
        finally:
            response.turn_running = False
            self.monitor.turn_ended(response.playback)
            await events.aclose()
        if not ended:
            raise StageFailedError("The turn ended without a result.")

    def _handle(self, response: ActiveResponse, event: TurnEvent) -> None:
        match event:
            case AudioDelta():
                if response.in_conversation and not response.writer.done:
                    self.monitor.audio_generated(response.playback, len(event.pcm) / _BYTES_PER_S)
                response.writer.add_audio(event)
            case TranscriptDelta():
                response.writer.add_transcript(event.text, event.n_tokens)
            case TextDone():
                if response.in_conversation:
                    self.monitor.text_completed(response.playback, event.n_tokens)
            case TurnDone():
                self._finish(response, event)

    def _finish(self, response: ActiveResponse, end: TurnDone) -> None:
        self._metrics.prompt_tokens.inc(end.usage.input_tokens)
        self._metrics.prompt_tokens_cached.inc(end.usage.cached_tokens)
        if response.in_conversation:
            self.monitor.turn_result(
                response.playback,
                n_tokens=len(end.item.token_ids or ()),
                n_frames=end.n_frames,
                spoken=end.spoken,
                marks=end.trace,
            )
        if response.writer.done:
            response.writer.set_end(end)
        else:
            for mark, at_s in end.trace.items():
                self._metrics.turn_marks_s.labels(mark).observe(at_s)
            self.parts.stage_spans.add(end.trace)
            self._complete(response, end)
        if not response.plan.stateless:
            self.changes.drop_compacted(end.gone, response_id=response.id)
        response.settle()

    def _complete(self, response: ActiveResponse, end: TurnDone) -> None:
        config, writer = response.plan.config, response.writer
        calls, malformed = read_calls(
            end.function_calls,
            config.tools,
            most=None if config.parallel_tool_calls else 1,
            metrics=self._metrics,
            response_id=response.id,
        )
        if not calls and writer.item is None and end.status == "completed":
            # A completed response with neither text nor function call would hide what was written.
            writer.add_transcript(malformed)
        writer.complete(end, calls)

    def _request(self, plan: ResponsePlan, items: tuple[Item, ...] | None = None) -> TurnRequest:
        """items: of the conversation; None: those it has now."""
        config = plan.config
        if plan.context is None:
            held = self.changes.conversation.items if items is None else items
            history = tuple(p for item in held if not item.has_left for p in item.pieces())
        else:
            history = tuple(seen for item in plan.context if (seen := item.history()))
        voice, speaker = self.parts.turn_voice(self.owner, config.voice)
        return TurnRequest(
            instructions=config.instructions,
            history=history,
            voice=voice,
            speaker=speaker,
            wants_audio=config.output_modalities == ("audio",),
            max_output_tokens=config.max_output_tokens,
            temperature=config.temperature,
            stateless=plan.stateless,
            retention=None if plan.stateless else config.truncation.retention,
            tools=tools_of(config.tools, config.tool_choice),
            cache_salt=owner_salt(self.owner),
            drops_oldest=not plan.stateless and config.truncation.wire != "disabled",
            begun=plan.begun,
        )


async def _judge(items: tuple[Item, ...]) -> None:
    for item in items:
        if isinstance(item, MessageItem) and item.is_unjudged:
            await asyncio.to_thread(item.judge)


def _follows_silence(plan: ResponsePlan, items: tuple[Item, ...]) -> bool:
    """Whether there is no speech in the newest item, and no other reason for a response."""
    newest = next((item for item in reversed(items) if not item.has_left), None)
    silent = isinstance(newest, MessageItem) and newest.is_silent
    return silent and plan.context is None and not plan.instructed


def _empty_result() -> TurnDone:
    item = HistoryItem(key=new_id("key"), role="assistant", parts=())
    return TurnDone(status="completed", reason=None, item=item, usage=Usage())
