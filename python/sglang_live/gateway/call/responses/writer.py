"""The output of one response: its items, from its creation to its end.

In: text, audio and result of the turn. Out: facts for the port; the assistant item, kept up to
date.
Owner: one ResponseWriter per response. Synchronous: when cancel() returns, the port knows that the
response is done, and nothing later is about this response.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_live.core import OUTPUT_RATE_HZ, AudioDelta, TurnDone, Usage
from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import WireEncoder
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.conversation import ROOT, Conversation
from sglang_live.gateway.call.conversation.items import FunctionCallItem, Item, Status
from sglang_live.gateway.call.ports import ResponsePort
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.tools import FunctionCall
from sglang_live.ids import new_id
from sglang_live.interaction.playback import PRIOR_FRAMES_PER_TOKEN, ResponsePlayback
from sglang_live.sound.tempo import Tempo


class ResponseWriter:
    """
    item: the assistant item; None before the first text or audio.
    status: in_progress, completed, incomplete, cancelled or failed. reason: of that status, if it
        has one.
    error: why it failed. usage: of its turn, if that has ended before the response.
    """

    def __init__(
        self,
        plan: ResponsePlan,
        conversation: Conversation,
        port: ResponsePort,
        *,
        on_audio_sent: Callable[[bytes, float], None] = lambda frame, duration_s: None,
        frames_per_token: float = PRIOR_FRAMES_PER_TOKEN,
    ) -> None:
        """
        Args:
            on_audio_sent: called with every audio frame that the network took, and its duration.
            frames_per_token: expected codec frames per token.
        """
        self.plan = plan
        self._conversation = conversation
        self._port = port
        self._on_audio_sent = on_audio_sent
        self._frames_per_token = frames_per_token
        self._encoder = WireEncoder(plan.config.output_format)
        speed = plan.config.speed
        self._tempo = Tempo(speed, OUTPUT_RATE_HZ) if speed != 1 else None
        self._n_known_bytes = 0  # of audio to come, that the client has
        self.item: AssistantItem | None = None
        self._calls: list[FunctionCallItem] = []
        self._after_id: str | None = None
        self.status = "in_progress"
        self.reason: str | None = None
        self.error: LiveError | None = None
        self.usage: Usage | None = None

    @property
    def id(self) -> str:
        return self.plan.response_id

    @property
    def conversation_id(self) -> str | None:
        """Of the conversation that its items join, if they do."""
        return self._conversation.id if self.plan.in_conversation else None

    @property
    def output(self) -> list[Item]:
        return [*([self.item] if self.item else []), *self._calls]

    @property
    def done(self) -> bool:
        return self.status != "in_progress"

    @property
    def made_audio_s(self) -> float:
        """Seconds of audio made, sent or not."""
        return self.item.made_ms / 1000 if self.item else 0.0

    @property
    def all_audio_sent(self) -> bool:
        return self.done and (self.item is None or self.item.sent_bytes == self.item.made_bytes)

    def create(self) -> None:
        self._port.response_created(self)

    def place_after(self, item_id: str | None) -> None:
        """Insert the item behind item_id, whatever the client adds while the turn runs.

        item_id: None: at the beginning of the conversation.
        """
        self._after_id = item_id or ROOT

    @property
    def after_id(self) -> str | None:
        """Id of the item behind which its own are; None: they are the first."""
        return None if self._after_id == ROOT else self._after_id

    def go_on(self, item: AssistantItem | None, heard_s: float) -> None:
        """The response of another gateway, whose item is in the conversation.

        heard_s: audio at its beginning that the client has.
        """
        self.item = item
        if item is None:
            return
        begun = self.plan.begun
        item.begin_again(begun.said if begun else "", len(begun.ids) if begun else 0)
        if item.modality == "audio":
            self._n_known_bytes = item.audio_format.n_bytes(1000 * heard_s)

    def restore(
        self,
        status: str,
        reason: str | None,
        item: AssistantItem | None,
        calls: Sequence[FunctionCallItem],
    ) -> None:
        """The response is another gateway's, and done. The client has got all of its audio."""
        self.status, self.reason, self.item, self._calls = status, reason, item, [*calls]
        if item is not None and status != "cancelled":
            item.sent_bytes = item.made_bytes

    def add_transcript(self, text: str, n_tokens: int = 0) -> None:
        """n_tokens: tokens of all text so far, this delta included; 0: unknown."""
        if self.done or not text:
            return
        item = self._open_item()
        item.add_text(text, n_tokens)
        self._port.text_added(self, item, text)

    def add_audio(self, audio: AudioDelta) -> None:
        if not self.done and self.plan.config.output_modalities == ("audio",):
            pcm = self._tempo.push(audio.pcm) if self._tempo else audio.pcm
            self._send_frames(self._encoder.push(pcm))
            if audio.spoken:
                self._open_item().add_spoken(audio.spoken)

    def complete(self, end: TurnDone, calls: Sequence[FunctionCall] = ()) -> None:
        """calls: function calls that the model wrote after its text."""
        if self.done:
            return
        assert end.status != "interrupted"  # a response ends before its turn is interrupted
        if not calls and (end.item.parts or end.item.token_ids):
            # Also if nothing was sent: the model's session holds this output.
            self._open_item()
        if self.item and self.item.modality == "audio":
            if self._tempo:
                self._send_frames(self._encoder.push(self._tempo.finish()))
            self._send_frames(self._encoder.finish())
        self._finish(end.status, end.reason, end, calls)

    def set_end(self, end: TurnDone) -> None:
        """Give the item of a response that ended early what its turn generated."""
        if self.item:
            self.item.set_end(end)

    def cancel(self, reason: str) -> None:
        """reason: "turn_detected" or "client_cancelled"."""
        if not self.done:
            self._finish("cancelled", reason)

    def fail(self, error: LiveError) -> None:
        if not self.done:
            self.error = error
            self._finish("failed", error.code)

    def audio_sent(self, frame: bytes) -> None:
        """The network took the next audio of the response, in the item's format."""
        assert self.item is not None
        self.item.audio_sent(frame)
        self._on_audio_sent(frame, self.item.audio_format.duration_ms(len(frame)) / 1000)

    def _send_frames(self, frames: list[bytes]) -> None:
        for frame in frames:
            item = self._open_item()
            item.made_bytes += len(frame)
            if self._n_known_bytes:
                n_known = min(len(frame), self._n_known_bytes)
                self._n_known_bytes -= n_known
                item.audio_sent(frame[:n_known])
                frame = frame[n_known:]
            if frame:
                self._port.audio_added(self, item, frame)

    def _open_item(self) -> AssistantItem:
        if self.item:
            return self.item
        config = self.plan.config
        item = AssistantItem(
            new_id("item"),
            "audio" if config.output_modalities == ("audio",) else "text",
            config.output_format,
            self._frames_per_token,
            config.speed,
        )
        self.item = item
        self._port.item_opened(self, item, self._insert(item, self._after_id))
        return item

    def _insert(self, item: Item, after_id: str | None) -> str | None:
        if not self.plan.in_conversation:
            return None
        return self._conversation.insert(item, after_id)

    def _finish(
        self,
        status: str,
        reason: str | None,
        end: TurnDone | None = None,
        calls: Sequence[FunctionCall] = (),
    ) -> None:
        try:
            if self.item:
                self._close_item(self.item, status, end)
            for call in calls:
                assert end is not None  # function calls come with the result of the turn
                self._add_call(call, end)
        finally:  # the client waits for the end before it creates another response
            self.status = status
            self.reason = reason
            self.usage = end.usage if end else None
            self._port.response_done(self)

    def _add_call(self, call: FunctionCall, end: TurnDone) -> None:
        carrier = self.item or (self._calls[0] if self._calls else None)
        item = FunctionCallItem(call, end.item, carrier)
        before_id = self._calls[-1].id if self._calls else self.item and self.item.id
        self._calls.append(item)
        assert item.call_id is not None
        self._conversation.remember_call(item.call_id)  # an output may refer to it even out of band
        self._port.function_called(self, item, self._insert(item, before_id or self._after_id))

    def _close_item(self, item: AssistantItem, status: str, end: TurnDone | None) -> None:
        if end:
            item.set_end(end)
        shown: Status = "completed" if status == "completed" else "incomplete"
        item.close(shown, stopped=status == "cancelled")
        # By the item, not by its id: the client may have deleted it and created another of that id.
        is_held = self.plan.in_conversation and not item.has_left
        before = self._conversation.id_before(item) if is_held else None
        self._port.item_closed(self, item, before)


# --- one response, from its creation until its audio has been heard ---


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
    is_moved: another gateway has begun it.
    """

    plan: ResponsePlan
    writer: ResponseWriter
    playback: ResponsePlayback
    on_settled: Callable[["ActiveResponse"], None]
    task: asyncio.Task[None] | None = None
    turn_running: bool = False
    audio_started: bool = False
    settled: bool = False
    is_moved: bool = False

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
