"""The turns of one session, as its responses ask for them.

In: Run. Out: a task for each, its events in the run's writer.
Owner: one Turns per connection. Ending a response is immediate for the client; its turn winds
down here in the background, and the next turn of the conversation waits for that.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from sglang_live.clock import Clock
from sglang_live.core import (
    OUTPUT_RATE_HZ,
    AudioDelta,
    HistoryItem,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
    Usage,
)
from sglang_live.errors import DeadlineError, LiveError, StageFailedError
from sglang_live.gateway.errors import internal_error
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.model import voice_of
from sglang_live.gateway.realtime.conversation.events import ConversationEvents
from sglang_live.gateway.realtime.conversation.items import Item, MessageItem
from sglang_live.gateway.realtime.responses.plan import ResponsePlan
from sglang_live.gateway.realtime.responses.playout import Answer, Playout
from sglang_live.gateway.realtime.responses.speculation import SpeculativeTurn
from sglang_live.gateway.realtime.responses.writer import ResponseWriter
from sglang_live.gateway.realtime.session_config import SessionConfig
from sglang_live.gateway.realtime.turns.turn_prefill import Pieces
from sglang_live.gateway.tools import MalformedCallError, read_function_call, tools_of
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# A client that vanished must be forgotten within 2 s; the session's own close needs some of it.
_WIND_DOWN_S = 1.0
# An interrupted turn ends within a round or two of its stages, or something is wrong with it.
_INTERRUPT_S = 5.0
# A cancelled turn that is stuck must fail the next one instead of keeping it waiting for ever.
_PREDECESSOR_S = 10.0
_BYTES_PER_S = 2 * OUTPUT_RATE_HZ


@dataclass(eq=False, slots=True)
class Run:
    """One response being made.

    answer: None beside the conversation, where nobody knows whether it is played.
    task: set by Turns.start. items: what the conversation held then.
    asked: the session works on its turn.
    sounded: some of its audio was sent. settled: it is over for the client.
    """

    plan: ResponsePlan
    writer: ResponseWriter
    answer: Answer | None = None
    task: asyncio.Task[None] | None = None
    items: tuple[Item, ...] = ()
    asked: bool = False
    sounded: bool = False
    settled: bool = False


@dataclass(eq=False)
class Turns:
    """
    voices: names the model knows; the first is the default.
    cache_salt: of the owner (gateway/owner.py).
    """

    session: VoiceSession
    items: ConversationEvents
    playout: Playout
    monitor: SessionMonitor
    voices: tuple[str, ...]
    clock: Clock
    metrics: GatewayMetrics
    cache_salt: str
    settle: Callable[[Run], None]

    def __post_init__(self):
        self._tasks: set[asyncio.Task[None]] = set()
        self._main_tasks: set[asyncio.Task[None]] = set()
        self._deadlines: dict[Run, asyncio.Task[None]] = {}
        self._speculative: SpeculativeTurn | None = None

    def start(self, run: Run) -> None:
        in_conversation = run.plan.in_conversation
        speculate, predecessors = None, frozenset()
        if in_conversation:
            speculate = self._guess_for(run.plan)
            predecessors = frozenset(self._main_tasks - {speculate.task if speculate else None})
        # What the client adds from now on, it adds behind this response.
        run.items = self.items.conversation.items
        run.writer.place_after(self.items.conversation.last_id)
        run.task = asyncio.create_task(self._run(run, predecessors, speculate))
        self._keep(run.task, in_conversation)

    def _keep(self, task: asyncio.Task[None], in_conversation: bool) -> None:
        for tasks in (self._tasks, self._main_tasks) if in_conversation else (self._tasks,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def speculate(self, config: SessionConfig, said: Pieces) -> bool:
        """Begin to answer what was said so far, for nobody yet. False: not now."""
        if self._main_tasks:
            return False
        request = self.request(config)
        history = (*request.history, *said)
        request = replace(request, history=history, speculative=True)
        self._speculative = SpeculativeTurn(self.session, request, said)
        self._keep(self._speculative.task, in_conversation=True)
        return True

    @property
    def speculated(self) -> Pieces:
        """What was said, if an answer to it has begun for nobody yet."""
        return self._speculative.said if self._speculative else ()

    def withdraw_speculative(self) -> None:
        speculate, self._speculative = self._speculative, None
        if speculate is not None:
            self.metrics.speculative_turns.labels("withdrawn").inc()
            speculate.withdraw()

    def _guess_for(self, plan: ResponsePlan) -> SpeculativeTurn | None:
        """The guess, if it is this turn; otherwise there is none any more."""
        if self._speculative is None:
            return None
        if plan.stateless or not self._speculative.is_for(self._request(plan)):
            self.withdraw_speculative()
            return None
        speculate, self._speculative = self._speculative, None
        self.metrics.speculative_turns.labels("answered").inc()
        return speculate

    def end(self, run: Run) -> None:
        """Its response is over. The session keeps what was generated, if it can."""
        assert run.task is not None
        if run.asked and not run.plan.stateless and self.session.interrupt():
            self._deadlines[run] = asyncio.create_task(self._cancel_late(run))
        else:
            run.task.cancel()

    async def close(self) -> None:
        """Cancel everything and wait until the orchestrator has let go, within bounds."""
        self._speculative = None
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

    async def _cancel_late(self, run: Run) -> None:
        await self.clock.sleep(_INTERRUPT_S)
        log.warning("turn_not_interrupted response=%s", run.plan.response_id)
        assert run.task is not None
        run.task.cancel()

    async def _run(
        self,
        run: Run,
        predecessors: frozenset[asyncio.Task[None]],
        speculate: SpeculativeTurn | None,
    ) -> None:
        try:
            if predecessors:
                # The session takes one turn at a time; an ended one may still be winding down.
                await self._until_ended(predecessors)
            await self._produce(run, speculate)
        except LiveError as error:
            log.warning("turn_failed response=%s code=%s", run.plan.response_id, error.code)
            run.writer.fail(error)
        except Exception:
            log.exception("turn_crashed response=%s", run.plan.response_id)
            run.writer.fail(internal_error())
        finally:
            run.asked = False
            if deadline := self._deadlines.pop(run, None):
                deadline.cancel()
            try:
                # After our own cancel this changes nothing; otherwise the server is going down.
                run.writer.cancel("client_cancelled")
            finally:
                self.settle(run)

    async def _until_ended(self, turns: frozenset[asyncio.Task[None]]) -> None:
        _, stuck = await asyncio.wait(turns, timeout=_PREDECESSOR_S)
        if stuck:
            raise DeadlineError("The turn before this one does not end.")

    async def _produce(self, run: Run, speculate: SpeculativeTurn | None) -> None:
        # Not kept: what is forgotten later would stay for as long as somebody knows of this run.
        items, run.items = run.items, ()
        await _judge(run.plan.context or items)
        if _is_answer_to_silence(run.plan, items):
            if speculate is not None:
                speculate.withdraw()
            return self._finish(run, _nothing_to_say())
        if speculate is not None:
            events = speculate.events()
        else:
            # Now that earlier turns have ended, the history knows what they generated.
            events = self.session.respond(self._request(run.plan, items))
        run.asked = True
        if run.answer and not run.plan.stateless:
            self.monitor.turn_began(run.answer.reply)
        ended = False
        try:
            async for event in events:
                self._take(run, event)
                ended = ended or isinstance(event, TurnDone)
        finally:
            run.asked = False
            if run.answer:
                self.monitor.turn_ended(run.answer.reply)
            close = getattr(events, "aclose", None)
            if close:
                await close()
        if not ended:
            raise StageFailedError("The turn ended without a result.")

    def _take(self, run: Run, event: TurnEvent) -> None:
        match event:
            case AudioDelta():
                if run.answer and not run.writer.done:
                    self.monitor.generated(run.answer.reply, len(event.pcm) / _BYTES_PER_S)
                run.writer.add_audio(event.pcm)
            case TranscriptDelta():
                run.writer.add_transcript(event.text, event.n_tokens)
            case TurnDone():
                self._finish(run, event)

    def _finish(self, run: Run, end: TurnDone) -> None:
        if run.answer:
            self.playout.learn(run.answer, end)
        if run.writer.done:
            run.writer.learn(end)
        else:
            for mark, at_s in end.trace.items():
                self.metrics.turn_marks_s.labels(mark).observe(at_s)
            self._complete(run, end)
        if not run.plan.stateless:
            self.items.drop_compacted(end.gone, response_id=run.plan.response_id)
        self.settle(run)

    def _complete(self, run: Run, end: TurnDone) -> None:
        calls, fault = [], None
        for text in end.function_calls:
            try:
                calls.append(read_function_call(text, run.plan.config.tools))
            except MalformedCallError as error:
                log.warning("tool_call_malformed response=%s: %r", run.plan.response_id, str(error))
                fault = error
        n_wrong = len(end.function_calls) - len(calls)
        n_made = len(calls) if run.plan.config.parallel_tool_calls else min(1, len(calls))
        self.metrics.tool_calls.labels("made").inc(n_made)
        self.metrics.tool_calls.labels("malformed").inc(n_wrong)
        self.metrics.tool_calls.labels("surplus").inc(len(calls) - n_made)
        if fault and not calls and run.writer.item is None:
            # Nothing was said and nothing is called: silence would be no answer.
            run.writer.fail(fault)
        else:
            run.writer.complete(end, calls[:n_made])

    def prefill_turn(self, config: SessionConfig, pieces: Pieces) -> bool:
        """What is being said goes where the next turn will need it. False: not now."""
        if self._main_tasks:
            return False
        request = self.request(config)
        history = (*request.history, *pieces)
        return self.session.prefill_turn(replace(request, history=history, prefill_only=True))

    async def until_idle(self) -> None:
        """No turn of the conversation runs any more."""
        while self._main_tasks:
            await asyncio.wait(self._main_tasks)

    def request(self, config: SessionConfig) -> TurnRequest:
        """A turn of the conversation as it is."""
        return self._request(ResponsePlan(config=config, decided_at_s=self.clock.now_s()))

    def _request(self, plan: ResponsePlan, items: tuple[Item, ...] | None = None) -> TurnRequest:
        """items: of the conversation; None: those it has now."""
        config = plan.config
        if plan.context is None:
            held = self.items.conversation.items if items is None else items
            history = tuple(p for item in held if not item.has_left for p in item.pieces())
        else:
            history = tuple(seen for item in plan.context if (seen := item.history()))
        return TurnRequest(
            instructions=config.instructions,
            history=history,
            voice=voice_of(self.voices, config.voice),
            wants_audio=config.output_modalities == ("audio",),
            max_output_tokens=config.max_output_tokens,
            temperature=config.temperature,
            stateless=plan.stateless,
            retention=None if plan.stateless else config.truncation.retention,
            tools=tools_of(config.tools, config.tool_choice),
            cache_salt=self.cache_salt,
            drops_oldest=not plan.stateless and config.truncation.wire != "disabled",
        )


async def _judge(items: tuple[Item, ...]) -> None:
    for item in items:
        if isinstance(item, MessageItem) and item.is_unjudged:
            await asyncio.to_thread(item.judge)


def _is_answer_to_silence(plan: ResponsePlan, items: tuple[Item, ...]) -> bool:
    """The newest item holds no speech, and nothing else asks for this response."""
    newest = next((item for item in reversed(items) if not item.has_left), None)
    silent = isinstance(newest, MessageItem) and newest.is_silent
    return silent and plan.context is None and not plan.instructed


def _nothing_to_say() -> TurnDone:
    reply = HistoryItem(key=new_id("key"), role="assistant", parts=())
    return TurnDone(status="completed", reason=None, item=reply, usage=Usage())
