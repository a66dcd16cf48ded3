"""What a response is made with: settings and context."""

from dataclasses import dataclass, field

from sglang_live.core import BegunTurn
from sglang_live.gateway.call.conversation.items import Item
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.ids import new_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan:
    """The settings and the context of one response.

    config: the session's settings with those of response.create over them.
    decided_at_s: when the user's turn was known to be over, on the gateway's clock.
    speech_end_at_s: when the user stopped speaking, on the same clock; None if no detected speech
        led to the response.
    context: items that replace the conversation in the prompt; None: the conversation.
    instructed: it has instructions of its own, so that it is made even after a turn without speech.
    in_conversation: its items join the conversation; False for an out-of-band response.
    begun: what has come of it at another gateway.
    """

    config: SessionConfig
    decided_at_s: float
    speech_end_at_s: float | None = None
    context: tuple[Item, ...] | None = None
    instructed: bool = False
    in_conversation: bool = True
    metadata: dict[str, str] | None = None
    begun: BegunTurn | None = None
    response_id: str = field(default_factory=lambda: new_id("resp"))

    @property
    def stateless(self) -> bool:
        """Whether its turn uses no KV of the session, which holds the conversation only."""
        return not self.in_conversation or self.context is not None
