"""One session as the gateway has it: its conversation, its responses, and their playback.

In: ends of the user's turns, interruptions, acks. Out: what its client receives. All but the
microphone is the gateway's own: TurnRunner builds the turns, AudibleResponses and SessionMonitor
follow what is heard, and truncate the conversation to it.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, cast

import numpy as np

from sglang_live.aio import close_all
from sglang_live.core import INPUT_RATE_HZ, AudioPart, HistoryItem
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.call.conversation.changes import ConversationChanges
from sglang_live.gateway.call.conversation.conversation import Conversation
from sglang_live.gateway.call.conversation.items import (
    AudioContent,
    Item,
    MessageItem,
)
from sglang_live.gateway.call.responses.audible import AudibleResponses
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.responses.responses import Responses
from sglang_live.gateway.call.responses.speculation import Utterance
from sglang_live.gateway.call.responses.turn_runner import TurnRunner
from sglang_live.gateway.call.sent_log import OnSent
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.server_events import RealtimePort
from sglang_live.ids import new_id
from sglang_live.interaction.filters.echo import EchoFilter
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.timeline import Timeline
from sglang_live.orchestrator.sessions import VoiceSession

# A server tries again to compute lost KV with each packet of the user's audio.
_PACKET_S = 0.1

# Called with the type of a server event, the id of its response or "", the seconds of audio in it,
# and its fields.
Receive = Callable[[str, str, float, dict[str, Any]], None]


class _Line:
    """The way to the client, as Outbox: events arrive in order, late by the time of transport.

    is_cut: the client has vanished, and nothing is taken any more.
    """

    def __init__(self, events: Events, delay_s: float, receive: Receive):
        self._events = events
        self._delay_s = delay_s
        self._receive = receive
        self.is_cut = False

    def emit(
        self,
        event_type: str,
        /,
        on_sent: OnSent | None = None,
        lane: str | None = None,
        audio_s: float = 0.0,
        numbered: bool = True,
        **fields: Any,
    ) -> None:
        if self.is_cut:
            return
        arrive = partial(self._receive, event_type, lane or "", audio_s, fields)
        self._events.after(self._delay_s, arrive)
        if on_sent is not None:
            # When the writer has counted it.
            self._events.after(0.0, on_sent)

    def hold(self, lane: str) -> None:
        """Suspicions are not simulated: audio goes on until an interruption."""

    release = hold

    def discard_audio(self, lane: str) -> float:
        """The network has taken all of it."""
        return 0.0


class _Deaf:
    """No microphone hears what is played."""

    def playback_began(self, pcm: np.ndarray) -> None: ...

    def playback_stopped(self) -> None: ...


class _Restored(Item):
    """An item of the time before the session is simulated."""

    def __init__(self, history: HistoryItem):
        self.id = new_id("item")
        self._history = history

    def history(self) -> HistoryItem:
        return self._history

    @property
    def size_bytes(self) -> int:
        return 0


class Call:
    """
    Args:
        delay_s: from the gateway to the client.
    """

    def __init__(
        self,
        voice: VoiceSession,
        parts: GatewayParts,
        config: SessionConfig,
        events: Events,
        delay_s: float,
        receive: Receive,
    ):
        self.voice = voice
        self._config = config
        self._events = events
        self._line = _Line(events, delay_s, receive)
        port = RealtimePort(self._line.emit)
        limits = parts.config.sessions
        conversation = Conversation(limits.max_conversation_bytes, parts.item_budget)
        timeline = Timeline(voice.session_id, began_s=events.now_s(), began_unix_s=0.0, keeps=False)
        self._monitor = SessionMonitor(voice, events, parts.metrics, timeline, parts.user_prior)
        deaf = cast(EchoFilter, _Deaf())
        self._audible = AudibleResponses(
            self._line, port, conversation, self._monitor, parts.metrics, deaf
        )
        self._items = ConversationChanges(conversation, port, parts.metrics)
        self._runner = TurnRunner(parts, voice, self._items, self._monitor, ANONYMOUS)
        self._responses = Responses(
            parts=parts,
            changes=self._items,
            port=port,
            audible=self._audible,
            monitor=self._monitor,
            turn_runner=self._runner,
            admit=lambda: None,
        )
        self._preheats = parts.config.turns.preheat
        self._preheat_until_s = 0.0
        self._utterance: Utterance = ()

    # --- the user ---

    def restore(self, history: Iterable[HistoryItem]) -> None:
        """The conversation before the session is simulated."""
        for item in history:
            self._items.conversation.insert(_Restored(item))

    def speech_began(self, onset_s: float, end_s: float) -> None:
        """A voice that may be the user's turn; over a response it may be none.

        end_s: when the turn will be known to be over.
        """
        self._preheat_until_s = end_s
        if self._audible.any:
            self._monitor.speech_suspected(onset_s)
        else:
            self._started(onset_s)

    def interrupt(self, onset_s: float) -> None:
        """The voice over a response is the user's turn."""
        self._started(onset_s)
        self._responses.interrupt()

    def _started(self, onset_s: float) -> None:
        self._monitor.speech_started(onset_s)
        if self._preheats:
            self._preheat()

    def _preheat(self) -> None:
        if self._events.now_s() >= self._preheat_until_s or self._line.is_cut:
            return
        if not self._runner.prefill_turn(self._config, ()):
            self._events.after(_PACKET_S, self._preheat)

    def paused(self, said_s: float) -> None:
        """The user's turn may be over, after speech of said_s."""
        part = AudioPart(silence(said_s))
        self._utterance = (HistoryItem(key=new_id("item"), role="user", parts=(part,)),)
        self._runner.speculate(self._config, self._utterance)

    def resumed(self) -> None:
        """It was not."""
        self._utterance = ()
        self._runner.withdraw_speculative()

    def respond(self, audio_s: float, speech_end_s: float) -> str:
        """The user's turn is over. Returns the id of its response."""
        self._preheat_until_s = 0.0
        self._monitor.speech_stopped("silence")
        self._monitor.turn_committed()
        content = [AudioContent(AudioPart(silence(audio_s)))]
        self._items.add(MessageItem(new_id("item"), "user", content, self._utterance))
        self._utterance = ()
        plan = ResponsePlan(
            config=self._config,
            decided_at_s=self._events.now_s(),
            speech_end_at_s=speech_end_s,
        )
        self._responses.create_when_idle(plan)
        return plan.response_id

    # --- the client ---

    def ack(self, item_id: str, heard_s: float) -> None:
        """The client reports what it has played of an item."""
        if not self._line.is_cut:
            self._audible.ack(item_id, 1000 * heard_s)

    @property
    def is_cut(self) -> bool:
        """Whether nothing reaches the client any more."""
        return self._line.is_cut

    def vanish(self) -> None:
        """Nothing reaches the client any more."""
        self._line.is_cut = True

    async def close(self) -> None:
        """As RealtimeSession.close, and the connection behind it."""
        self._line.is_cut = True
        await close_all(
            self._responses.close,
            self._monitor.close,
            self._items.conversation.close,
            self.voice.close,
        )


@cache
def silence(duration_s: float) -> np.ndarray:
    """What a user says: nothing listens to it."""
    return np.zeros(round(duration_s * INPUT_RATE_HZ), np.int16)
