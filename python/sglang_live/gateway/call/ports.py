"""What a call tells its protocol: facts, as they become known.

Out: server events of the protocol, where it has any for them.
Owner: one CallPort per connection. Its methods neither block nor fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglang_live.core import HeardToken
from sglang_live.errors import LiveError
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.items import FunctionCallItem, Item
from sglang_live.gateway.rate_limits import RateLimitStatus

if TYPE_CHECKING:  # it has a port
    from sglang_live.gateway.call.responses.writer import ResponseWriter


class UserPort(Protocol):
    """The user's turns. Times are milliseconds of audio received in this call."""

    def speech_started(self, start_ms: int, item_id: str) -> None:
        """item_id: of the item that the turn becomes."""

    def speech_stopped(self, end_ms: int, item_id: str) -> None: ...

    def turn_committed(self, item_id: str, previous_id: str | None, duration_ms: float) -> None:
        """The item follows. duration_ms: of its audio."""

    def audio_cleared(self) -> None: ...

    def user_is_idle(self, start_ms: int, end_ms: int, item_id: str) -> None:
        """Neither user nor agent has spoken for that time, which becomes a turn."""

    def voice_suspected(self, onset_ms: int) -> None:
        """There is a voice over a response, which may be a turn."""

    def voice_ignored(self, decision: str, reason: str, onset_ms: int, end_ms: int) -> None:
        """The suspected voice is none."""


class TranscriptPort(Protocol):
    """The words of a user's turn. They may come before the turn is over, and after others."""

    def words_heard(self, item_id: str, text: str, start_ms: float, end_ms: float) -> None:
        """start_ms, end_ms: where in the turn's audio they were said."""

    def transcript_completed(
        self,
        item_id: str,
        text: str,
        duration_s: float,
        tokens: Sequence[HeardToken] | None,
    ) -> None:
        """tokens: None: the settings do not ask for them."""

    def transcript_failed(self, item_id: str, error: LiveError) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameReport:
    """A frame of frame mode that is over.

    start_ms, end_ms: in the call's audio.
    n_missing: frames that would have fitted into the time before it in which no audio came.
    outcome: on_time, late, dropped or empty.
    latency_ms: from its last sample to its last token; None: it has no tokens.
    error: why it is empty.
    """

    index: int
    start_ms: int
    end_ms: int
    n_missing: int
    outcome: str
    text: str = ""
    output_tokens: int = 0
    latency_ms: float | None = None
    error: LiveError | None = None


class ItemPort(Protocol):
    """Items of the conversation, apart from those of responses."""

    def item_added(self, item: Item, previous_id: str | None) -> None: ...

    def item_dropped(self, item_id: str, response_id: str | None) -> None:
        """The server dropped the item.

        Args:
            response_id: of the response that dropped it. The client learns of that response first.
        """

    def item_truncated(self, item_id: str, heard_ms: int) -> None:
        """The user has not heard the rest of its audio."""


class ResponsePort(Protocol):
    """The facts of one response keep their order. `writer` has its state."""

    def response_created(self, writer: "ResponseWriter") -> None: ...

    def limits_changed(self, limits: RateLimitStatus) -> None: ...

    def item_opened(
        self, writer: "ResponseWriter", item: AssistantItem, previous_id: str | None
    ) -> None:
        """previous_id: without a meaning for an out-of-band response."""

    def text_added(self, writer: "ResponseWriter", item: AssistantItem, text: str) -> None: ...

    def audio_added(self, writer: "ResponseWriter", item: AssistantItem, frame: bytes) -> None:
        """frame: in the item's format. The port calls writer.audio_sent with all of it, whole or
        in parts, when the network has taken them."""

    def item_closed(
        self, writer: "ResponseWriter", item: AssistantItem, previous_id: str | None
    ) -> None: ...

    def function_called(
        self, writer: "ResponseWriter", item: FunctionCallItem, previous_id: str | None
    ) -> None: ...

    def response_done(self, writer: "ResponseWriter") -> None: ...


class CallPort(UserPort, TranscriptPort, ItemPort, ResponsePort, Protocol):
    def frame_done(self, report: FrameReport) -> None: ...


class Lanes(Protocol):
    """Audio on its way to the network, by the response that it belongs to."""

    def hold(self, lane: str) -> None:
        """Send nothing of this lane until release()."""

    def release(self, lane: str) -> None: ...

    def discard_audio(self, lane: str) -> float:
        """Drop the unsent audio of this lane. Returns its duration in seconds."""
        ...
