"""The answers a caller may still be hearing, and what becomes of them.

In: audio the network took, evidence of what was heard. Out: replies cut to that, audio held,
released and discarded, conversation.item.truncated.
Owner: one Playout per connection. A response is over for the protocol when it is done; for the
listener when its audio has been played. This is about the listener.
"""

import logging
from dataclasses import dataclass

from sglang_live.core import TurnDone
from sglang_live.gateway.realtime.conversation.assistant_item import AssistantItem
from sglang_live.gateway.realtime.conversation.conversation import Conversation
from sglang_live.gateway.realtime.outbox import Outbox
from sglang_live.gateway.realtime.responses.writer import ResponseWriter
from sglang_live.interaction.monitor import Reply, SessionMonitor
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Answer:
    """A response in the conversation, and its audio as it is heard."""

    reply: Reply
    writer: ResponseWriter

    @property
    def item(self) -> AssistantItem | None:
        return self.writer.item

    @property
    def response_id(self) -> str:
        return self.reply.response_id


class Playout:
    def __init__(
        self,
        outbox: Outbox,
        conversation: Conversation,
        monitor: SessionMonitor,
        metrics: GatewayMetrics,
    ):
        self._outbox = outbox
        self._conversation = conversation
        self._monitor = monitor
        self._metrics = metrics
        self._answers: list[Answer] = []  # oldest first
        self._held: list[str] = []

    @property
    def audible(self) -> bool:
        """The caller is hearing an answer, or is in the middle of one."""
        return any(self._monitor.audible(answer.reply) for answer in self._answers)

    def add(self, answer: Answer) -> None:
        self._answers = [older for older in self._answers if not older.reply.retired]
        self._answers.append(answer)

    def sent(self, answer: Answer, duration_s: float) -> None:
        """The network took duration_s of its audio."""
        self._monitor.sent(answer.reply, duration_s)
        self.check_all_sent(answer)

    def check_all_sent(self, answer: Answer) -> None:
        """To be called when a response is done; the rest may still be on its way."""
        # Of a cancelled response nobody waits for the rest: it is stopped instead.
        if answer.writer.all_audio_sent and answer.writer.status != "cancelled":
            self._monitor.all_sent(answer.reply)

    def learn(self, answer: Answer, end: TurnDone) -> None:
        n_tokens = len(end.item.token_ids or ())
        self._monitor.learned(
            answer.reply,
            n_tokens=n_tokens,
            n_frames=end.n_frames,
            spoken=end.spoken,
            marks=end.trace,
        )

    def hold(self) -> None:
        self._held = [answer.response_id for answer in self._answers]
        for response_id in self._held:
            self._outbox.hold(response_id)

    def release(self) -> None:
        for response_id in self._held:
            self._outbox.release(response_id)
        self._held = []

    def discard(self, response_id: str) -> None:
        """Drop audio of a response that has not left."""
        self._metrics.audio_dropped_s.inc(self._outbox.discard_audio(response_id))
        self._outbox.release(response_id)

    def interrupt(self) -> None:
        """The caller speaks: what was heard of every answer by now is all of it."""
        for answer in self._answers:
            if not self._monitor.over(answer.reply):
                self.discard(answer.response_id)
                heard_s = self._monitor.stopped(answer.reply, barge_in=True)
                log.info("barge_in response=%s heard_ms=%d", answer.response_id, heard_s * 1000)
                self._cut(answer, heard_s, says_so=True)

    def cancel(self, answer: Answer) -> None:
        """The client has ended it. What was sent counts, unless the client tells us more."""
        by_acks = answer.reply.playback.by_acks
        heard_s = self._monitor.stopped(answer.reply, barge_in=False)
        if by_acks:
            self._cut(answer, heard_s, says_so=True)

    def ack(self, item_id: str, audio_end_ms: float) -> None:
        """The client says how far it has played.

        Raises:
            ClientEventError: there is no such item.
        """
        answer = self._find(item_id)
        if answer is None:
            self._conversation.get(item_id, action="ack")
            self._metrics.acks.labels("stale").inc()
            return
        heard_s = self._monitor.acked(answer.reply, audio_end_ms / 1000)
        if answer.reply.playback.stopped:
            self._cut(answer, heard_s, says_so=False)

    def truncated(self, item_id: str, audio_end_ms: float) -> None:
        """The client has cut an item; of newer replies this says when they stopped."""
        answer = self._find(item_id)
        if answer:
            self._monitor.truncated(answer.reply, audio_end_ms / 1000)

    def _cut(self, answer: Answer, heard_s: float, *, says_so: bool) -> None:
        item = answer.item
        if item is None or item.modality != "audio" or not item.end_playback(heard_s * 1000):
            return
        if says_so and not item.has_left:
            self._outbox.emit(
                "conversation.item.truncated",
                item_id=item.id,
                content_index=0,
                audio_end_ms=int(item.heard_ms),
            )

    def _find(self, item_id: str) -> Answer | None:
        found = (a for a in self._answers if a.item and a.item.id == item_id)
        return next(found, None)
