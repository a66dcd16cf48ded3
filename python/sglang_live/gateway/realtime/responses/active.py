"""One response, from response.created until its audio has been heard.

Owner: Responses creates it; the turn runner fills its writer, Playout follows its audio.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.gateway.realtime.conversation.assistant_item import AssistantItem
from sglang_live.gateway.realtime.responses.plan import ResponsePlan
from sglang_live.gateway.realtime.responses.writer import ResponseWriter
from sglang_live.interaction.response_playback import ResponsePlayback


@dataclass(eq=False, slots=True)
class ActiveResponse:
    """
    playback: what the user has heard of it. Of an out-of-band response it stays empty: a client
        does not have to play it.
    on_settled: called once, when the response is over for the client.
    task: its turn; None before the turn starts and after it has ended.
    turn_running: the session works on its turn.
    audio_started: some of its audio was sent.
    settled: on_settled was called.
    """

    plan: ResponsePlan
    writer: ResponseWriter
    playback: ResponsePlayback
    on_settled: Callable[["ActiveResponse"], None]
    task: asyncio.Task[None] | None = None
    turn_running: bool = False
    audio_started: bool = False
    settled: bool = False

    @property
    def id(self) -> str:
        return self.plan.response_id

    @property
    def in_conversation(self) -> bool:
        return self.plan.in_conversation

    @property
    def item(self) -> AssistantItem | None:
        return self.writer.item

    def settle(self) -> None:
        if not self.settled:
            self.settled = True
            self.on_settled(self)

    def unheard_s(self, now_s: float) -> float:
        """Seconds of its audio that the user will still hear."""
        if self.writer.status == "cancelled":
            return 0.0
        return max(0.0, self.writer.made_audio_s - self.playback.clock.heard_s(now_s))
