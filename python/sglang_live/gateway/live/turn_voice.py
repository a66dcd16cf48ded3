"""A model with turns as the voice of a Live session.

In: the user's audio, what the application appends. Out: speech, the user's words, delegations.
Owner: one TurnVoice per session. The server's turn taking decides when to speak; what the
application wants said waits until it is quiet.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_live.aio import Timer, close_all
from sglang_live.clock import Clock
from sglang_live.core import HeardToken, HistoryItem, PromptContent, TextPart
from sglang_live.errors import LiveError
from sglang_live.gateway.call.call import Call
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.items import (
    FunctionCallItem,
    FunctionItem,
    Item,
    MessageItem,
    TextContent,
    TextKind,
)
from sglang_live.gateway.call.ports import FrameReport
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.responses.writer import ResponseWriter
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.live.speech import Speech
from sglang_live.gateway.live.voice import TICK_MS, AppendKind, Said, Spoken, VoiceListener
from sglang_live.gateway.live.work import Item as BackendItem
from sglang_live.gateway.live.work import message
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitStatus
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession

# How the model is told what to do with what the application appends.
_TELLING: dict[AppendKind, str] = {
    "instructions": "{}",
    "thinking": "For your information, not to be said aloud: {}",
    "commentary": "Speak to the user now, in your own words, about this: {}",
}
# Turns whose transcripts are late: more fail (call/turns/input_transcription.py).
_MAX_TURNS = 32
# A transcript begins after the first audio of the response, and takes less than that.
_LATE_WORDS_S = 3.0
_MAX_DELEGATIONS = 4096
_ACKNOWLEDGE = "The task has begun. Tell the user in a few words that you are looking into it."


class TurnVoice:
    hears_silence = True

    def __init__(
        self,
        session: VoiceSession,
        config: SessionConfig,
        parts: GatewayParts,
        listener: VoiceListener,
        owner: str,
        acknowledgement_delay_ms: int,
        early_s: float = TICK_MS / 1000,
    ):
        """early_s: from what is taken to its sound."""
        self.acknowledgement_delay_ms = acknowledgement_delay_ms
        self._config = config
        self._parts = parts
        self._speech = Speech(config.output_format)
        self._port = _Port(self._speech, listener, parts.clock, self._on_wordless, self._on_dropped)
        self._call = Call(session, config, parts, self._port, self._speech, owner, early_s)
        self._restores = False
        self._rules: dict[str, str] = {}  # instructions that were appended, by item
        self._acknowledgement = Timer(parts.clock, self._acknowledge, "acknowledgement")

    @property
    def at_work(self) -> bool:
        return self._call.at_work or self._port.wants is not None or self._speech.waits

    async def begin(self, before: Iterable[Said]) -> None:
        limit, config = self._parts.context_limit, self._config
        await limit.check(
            PromptContent(instructions=config.instructions), header_at="session.instructions"
        )
        items = [_message(said.role, said.text) for said in before]
        history = [seen for item in items if (seen := item.history())]
        content = PromptContent.of(history, config.instructions)
        await limit.check(content, items_at="session.input")
        for item in items:
            self._call.changes.add(item)

    async def hear(self, raw: bytes) -> None:
        await self._call.turns.hear(raw)

    def take(self, n_bytes: int) -> Spoken:
        if self._port.wants and not self._port.user_speaks and not self._call.at_work:
            self._speak(acknowledges=self._port.wants == "acknowledgement")
        return self._speech.take(n_bytes)

    async def append(self, kind: AppendKind, text: str, delegation_id: str | None) -> None:
        if delegation_id is not None and delegation_id not in self._port.delegations:
            raise ClientEventError(
                f"There is no delegation '{cut(delegation_id)}'.", param="delegation_id"
            )
        item = self._appended(kind, text, delegation_id)
        await self._parts.context_limit.check_item(item, "content")
        self._call.conversation.budget.check(item.size_bytes)
        if delegation_id is not None and isinstance(item, FunctionItem):
            self._port.delegations[delegation_id].is_answered = True
        if kind == "instructions":
            self._rules[item.id] = text
        else:
            self._acknowledgement.disarm()
        self._call.changes.add(item)
        if kind == "commentary":
            self._port.wants = "commentary"

    def conversation(self) -> tuple[HistoryItem, ...]:
        items = self._call.conversation.items
        return tuple(piece for item in items for piece in item.pieces())

    def transcript(self) -> tuple[BackendItem, ...]:
        items = self._call.conversation.items
        return tuple(said for item in items if (said := _in_words(item)))

    def stop_speaking(self) -> None:
        self._port.wants = None
        self._call.responses.interrupt()

    async def close(self) -> None:
        self._port.wants = None
        await close_all(self._acknowledgement.disarm, self._port.close, self._call.close)

    def _appended(self, kind: AppendKind, text: str, delegation_id: str | None) -> Item:
        """The first report on a delegation is the output of its call."""
        told = _TELLING[kind].format(text)
        if not self._parts.config.model.follows_instructions:  # outputs it reads aloud
            is_said = kind == "commentary"
            return _output(new_id("call"), text) if is_said else _message("system", told)
        if delegation_id is None or kind == "instructions":
            return _message("system", told)
        if self._port.delegations[delegation_id].is_answered:
            return _message("system", told)
        return _output(delegation_id, told)

    def _on_dropped(self, item_id: str) -> None:
        """Instructions last: those that leave with the oldest items come again as the newest."""
        text = self._rules.pop(item_id, None)
        # Where there is no room but for instructions, each would drop another one.
        if text is not None and not self._restores:
            item = _message("system", text)
            self._rules[item.id] = text
            self._restores = True
            self._call.changes.add(item)
            self._restores = False

    def _speak(self, *, acknowledges: bool) -> None:
        plan = ResponsePlan(
            config=self._config, decided_at_s=self._parts.clock.now_s(), instructed=True
        )
        if acknowledges:
            self._port.acknowledgements.add(plan.response_id)
        self._call.responses.create_when_idle(plan)

    def _on_wordless(self) -> None:
        self._acknowledgement.arm(self.acknowledgement_delay_ms / 1000)

    def _acknowledge(self) -> None:
        if not self._parts.config.model.follows_instructions:
            return  # it would read them aloud
        self._call.changes.add(_message("system", _ACKNOWLEDGE))
        self._port.wants = self._port.wants or "acknowledgement"


def _in_words(item: Item) -> BackendItem | None:
    """A message in words, as far as they are known. None: it has none."""
    if item.has_left:
        return None
    match item:
        case AssistantItem():
            role, text = "assistant", item.visible_text
        case MessageItem():
            words = (
                part.text if isinstance(part, TextContent) else getattr(part, "transcript", None)
                for part in item.content
            )
            role, text = item.role, " ".join(filter(None, words))
        case FunctionItem():  # the application's report on work
            role, text = "system", item.fields["output"]
        case _:
            return None
    return message("developer" if role == "system" else role, text) if text else None


def _output(call_id: str, text: str) -> FunctionItem:
    fields = {"call_id": call_id, "output": text}
    seen = HistoryItem(key=new_id("key"), role="tool", parts=(TextPart(text),))
    return FunctionItem(new_id("item"), "function_call_output", fields, seen)


@dataclass(slots=True)
class _Delegation:
    is_answered: bool = False


class _Port:
    """The facts of the call, as far as a Live session has a use for them.

    user_speaks: a turn of the user has begun and not ended.
    wants: what is to be said without a turn of the user, and no response knows yet.
    acknowledgements: responses that only say that work has begun.
    delegations: by id, which is that of the function call. The application works from the user's
        words, so it learns of one after those, unless they are late.
    """

    def __init__(
        self,
        speech: Speech,
        listener: VoiceListener,
        clock: Clock,
        on_wordless: Callable[[], None],
        on_dropped: Callable[[str], None],
    ):
        """
        Args:
            on_wordless: called when work was delegated without a word to the user.
            on_dropped: called with an item that has left the conversation.
        """
        self.user_speaks = False
        self.wants: Literal["commentary", "acknowledgement"] | None = None
        self.acknowledgements: set[str] = set()
        self.delegations: dict[str, _Delegation] = {}
        self._speech = speech
        self._listener = listener
        self._on_wordless = on_wordless
        self._on_dropped = on_dropped
        self._heard_item: str | None = None  # of the newest words
        self._unwritten: set[str] = set()  # turns whose words are not known yet, by item
        self._unannounced: list[str] = []
        self._late_words = Timer(clock, self._announce, "late words")
        self._turn_starts: dict[str, int] = {}  # of those whose words may still come, by item

    # --- the user ---

    def speech_started(self, start_ms: int, item_id: str) -> None:
        self.user_speaks = True
        self._turn_starts[item_id] = start_ms
        if len(self._turn_starts) > _MAX_TURNS:
            del self._turn_starts[next(iter(self._turn_starts))]

    def speech_stopped(self, end_ms: int, item_id: str) -> None:
        self.user_speaks = False

    def turn_committed(self, item_id: str, previous_id: str | None, duration_ms: float) -> None:
        self._unwritten.add(item_id)

    def words_heard(self, item_id: str, text: str, start_ms: float, end_ms: float) -> None:
        if not text:
            return
        begin_ms = self._turn_starts.get(item_id, 0)
        if self._heard_item not in (None, item_id) and not text[:1].isspace():
            text = f" {text}"  # clients join the fragments of a session as they are
        self._heard_item = item_id
        self._listener.user_said(text, begin_ms + start_ms, begin_ms + end_ms)

    def transcript_completed(
        self,
        item_id: str,
        text: str,
        duration_s: float,
        tokens: Sequence[HeardToken] | None,
    ) -> None:
        self._written(item_id)

    def transcript_failed(self, item_id: str, error: LiveError) -> None:
        self._written(item_id)

    def _written(self, item_id: str) -> None:
        self._turn_starts.pop(item_id, None)
        self._unwritten.discard(item_id)
        if not self._unwritten:
            self._announce()

    def _announce(self) -> None:
        self._late_words.disarm()
        announced, self._unannounced = self._unannounced, []
        for delegation_id in announced:
            self._listener.delegated(delegation_id)

    def audio_cleared(self) -> None:
        """The protocol clears none."""

    def user_is_idle(self, start_ms: int, end_ms: int, item_id: str) -> None:
        """Silence has no turn in it."""

    def voice_suspected(self, onset_ms: int) -> None:
        """The client hears it."""

    def voice_ignored(self, decision: str, reason: str, onset_ms: int, end_ms: int) -> None:
        """The client hears it."""

    def frame_done(self, report: FrameReport) -> None:
        """There are turns."""

    # --- the conversation, which the protocol does not show ---

    def item_added(self, item: Item, previous_id: str | None) -> None: ...

    def item_dropped(self, item_id: str, response_id: str | None) -> None:
        self._on_dropped(item_id)

    def item_truncated(self, item_id: str, heard_ms: int) -> None: ...

    # --- responses ---

    def response_created(self, writer: ResponseWriter) -> None:
        self.wants = None  # it knows all that was appended

    def limits_changed(self, limits: RateLimitStatus) -> None:
        """The protocol does not show them."""

    def item_opened(
        self, writer: ResponseWriter, item: AssistantItem, previous_id: str | None
    ) -> None:
        self._speech.open(writer, item)

    def text_added(self, writer: ResponseWriter, item: AssistantItem, text: str) -> None:
        """It leaves with its audio."""

    def audio_added(self, writer: ResponseWriter, item: AssistantItem, frame: bytes) -> None:
        self._speech.add(writer.id, frame)

    def item_closed(
        self, writer: ResponseWriter, item: AssistantItem, previous_id: str | None
    ) -> None:
        self._speech.close(writer.id)

    def function_called(
        self, writer: ResponseWriter, item: FunctionCallItem, previous_id: str | None
    ) -> None:
        assert item.call_id is not None
        if writer.id in self.acknowledgements:
            return  # the work that it speaks of has begun
        self.delegations[item.call_id] = _Delegation()
        if len(self.delegations) > _MAX_DELEGATIONS:
            del self.delegations[next(iter(self.delegations))]
        self._unannounced.append(item.call_id)
        if self._unwritten:
            self._late_words.arm(_LATE_WORDS_S)
        else:
            self._announce()
        if writer.item is None:
            self._on_wordless()

    def close(self) -> None:
        self._late_words.disarm()

    def response_done(self, writer: ResponseWriter) -> None:
        self.acknowledgements.discard(writer.id)
        if writer.error is not None:
            self._listener.voice_failed(writer.error)


def _message(role: Literal["system", "user", "assistant"], text: str) -> MessageItem:
    kind: TextKind = "output_text" if role == "assistant" else "input_text"
    return MessageItem(new_id("item"), role, (TextContent(kind, text),))
