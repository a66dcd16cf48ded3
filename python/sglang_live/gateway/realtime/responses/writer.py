"""The event sequence of one response, from response.created to response.done.

In: text, audio and result of the turn. Out: server events; the assistant item, kept up to date.
Owner: one ResponseWriter per response. Synchronous: when cancel() returns, response.done has been
emitted, and no later event is about this response.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_live.core import AudioDelta, TurnDone, Usage
from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import WireEncoder, encode_base64
from sglang_live.gateway.errors import error_body
from sglang_live.gateway.realtime.conversation.assistant_item import AssistantItem
from sglang_live.gateway.realtime.conversation.conversation import ROOT, Conversation
from sglang_live.gateway.realtime.conversation.items import FunctionCallItem, Item, Status
from sglang_live.gateway.realtime.outbox import Emit
from sglang_live.gateway.realtime.responses.plan import ResponsePlan
from sglang_live.gateway.tools import FunctionCall
from sglang_live.ids import new_id
from sglang_live.interaction.playback import PRIOR_FRAMES_PER_TOKEN, ResponsePlayback


class ResponseWriter:
    """
    item: the assistant item; None before the first text or audio.
    status: of the response, as response.done names it. reason: of that status, if it has one.
    """

    def __init__(
        self,
        plan: ResponsePlan,
        conversation: Conversation,
        emit: Emit,
        *,
        on_audio_sent: Callable[[bytes, float], None] = lambda frame, duration_s: None,
        frames_per_token: float = PRIOR_FRAMES_PER_TOKEN,
    ) -> None:
        """
        Args:
            on_audio_sent: called with every audio frame that the network took, and its duration.
            frames_per_token: expected codec frames per token.
        """
        self._plan = plan
        self._conversation = conversation
        # In one lane the events of a response keep their order while its audio is held.
        self._emit = partial(emit, lane=plan.response_id)
        self._on_audio_sent = on_audio_sent
        self._frames_per_token = frames_per_token
        self._encoder = WireEncoder(plan.config.output_format)
        self.item: AssistantItem | None = None
        self._calls: list[FunctionCallItem] = []
        self._after_id: str | None = None
        self.status = "in_progress"
        self.reason: str | None = None

    @property
    def done(self) -> bool:
        return self.status != "in_progress"

    @property
    def made_audio_s(self) -> float:
        """Seconds of audio emitted, sent or not."""
        return self.item.made_ms / 1000 if self.item else 0.0

    @property
    def all_audio_sent(self) -> bool:
        return self.done and (self.item is None or self.item.sent_bytes == self.item.made_bytes)

    def create(self) -> None:
        self._emit("response.created", response=self._response())

    def place_after(self, item_id: str | None) -> None:
        """Insert the item behind item_id, whatever the client adds while the turn runs.

        item_id: None: at the beginning of the conversation.
        """
        self._after_id = item_id or ROOT

    def add_transcript(self, text: str, n_tokens: int = 0) -> None:
        """n_tokens: tokens of all text so far, this delta included; 0: unknown."""
        if self.done or not text:
            return
        item = self._open_item()
        item.add_text(text, n_tokens)
        kind = "output_text" if item.modality == "text" else "output_audio_transcript"
        self._emit(f"response.{kind}.delta", delta=text, **self._part_address(item))

    def add_audio(self, audio: AudioDelta) -> None:
        if not self.done and self._plan.config.output_modalities == ("audio",):
            self._send_frames(self._encoder.push(audio.pcm))
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
            self._send_frames(self._encoder.finish())
        details = None
        if end.status == "incomplete":
            details = {"type": "incomplete", "reason": end.reason}
        self._finish(end.status, end.reason, details, end, calls)

    def set_end(self, end: TurnDone) -> None:
        """Give the item of a response that ended early what its turn generated."""
        if self.item:
            self.item.set_end(end)

    def cancel(self, reason: str) -> None:
        """reason: "turn_detected" or "client_cancelled"."""
        if not self.done:
            self._finish("cancelled", reason, {"type": "cancelled", "reason": reason})

    def fail(self, error: LiveError) -> None:
        if not self.done:
            body = error_body(error)
            shown = {key: body[key] for key in ("type", "code", "message")}
            self._finish("failed", error.code, {"type": "failed", "error": shown})

    def _send_frames(self, frames: list[bytes]) -> None:
        for frame in frames:
            item = self._open_item()
            item.made_bytes += len(frame)
            duration_s = item.audio_format.duration_ms(len(frame)) / 1000
            self._emit(
                "response.output_audio.delta",
                on_sent=partial(self._audio_sent, frame, duration_s),
                audio_s=duration_s,
                delta=encode_base64(frame),
                **self._part_address(item),
            )

    def _audio_sent(self, frame: bytes, duration_s: float) -> None:
        assert self.item is not None
        self.item.audio_sent(frame)
        self._on_audio_sent(frame, duration_s)

    def _open_item(self) -> AssistantItem:
        if self.item:
            return self.item
        config = self._plan.config
        item = AssistantItem(
            new_id("item"),
            "audio" if config.output_modalities == ("audio",) else "text",
            config.output_format,
            self._frames_per_token,
        )
        self.item = item
        self._emit("response.output_item.added", item=item.to_json(), **self._item_address())
        if self._plan.in_conversation:
            before = self._conversation.insert(item, self._after_id)
            self._emit("conversation.item.added", previous_item_id=before, item=item.to_json())
        item.has_content = True
        self._emit("response.content_part.added", part=item.part(), **self._part_address(item))
        return item

    def _finish(
        self,
        status: str,
        reason: str | None,
        details: dict[str, Any] | None,
        end: TurnDone | None = None,
        calls: Sequence[FunctionCall] = (),
    ) -> None:
        try:
            if self.item:
                self._close_item(self.item, status, end)
            for call in calls:
                assert end is not None  # function calls come with the result of the turn
                self._add_call(call, end)
        finally:  # the client waits for response.done before it creates another response
            self.status = status
            self.reason = reason
            self._emit("response.done", response=self._response(details, end))

    def _add_call(self, call: FunctionCall, end: TurnDone) -> None:
        carrier = self.item or (self._calls[0] if self._calls else None)
        item = FunctionCallItem(call, end.item, carrier)
        address = self._item_address(index=len(self._output()))
        before_id = self._calls[-1].id if self._calls else self.item and self.item.id
        self._calls.append(item)
        assert item.call_id is not None
        self._conversation.remember_call(item.call_id)  # an output may refer to it even out of band
        self._emit("response.output_item.added", item=item.to_json(), **address)
        if self._plan.in_conversation:
            before = self._conversation.insert(item, before_id or self._after_id)
            self._emit("conversation.item.added", previous_item_id=before, item=item.to_json())
        call_address = {**address, "item_id": item.id, "call_id": item.call_id}
        kind = "response.function_call_arguments"
        self._emit(f"{kind}.delta", delta=call.arguments, **call_address)
        self._emit(f"{kind}.done", arguments=call.arguments, name=call.name, **call_address)
        item.status = "completed"
        self._emit("response.output_item.done", item=item.to_json(), **address)
        if self._plan.in_conversation:
            before = self._conversation.id_before(item)
            self._emit("conversation.item.done", previous_item_id=before, item=item.to_json())

    def _output(self) -> list[Item]:
        return [*([self.item] if self.item else []), *self._calls]

    def _close_item(self, item: AssistantItem, status: str, end: TurnDone | None) -> None:
        if end:
            item.set_end(end)
        shown: Status = "completed" if status == "completed" else "incomplete"
        item.close(shown, stopped=status == "cancelled")
        address = self._part_address(item)
        if item.modality == "text":
            self._emit("response.output_text.done", text=item.text, **address)
        else:
            self._emit("response.output_audio.done", **address)
            self._emit("response.output_audio_transcript.done", transcript=item.text, **address)
        self._emit("response.content_part.done", part=item.part(), **address)
        self._emit("response.output_item.done", item=item.to_json(), **self._item_address())
        # By the item, not by its id: the client may have deleted it and created another of that id.
        if self._plan.in_conversation and not item.has_left:
            before = self._conversation.id_before(item)
            self._emit("conversation.item.done", previous_item_id=before, item=item.to_json())

    def _item_address(self, index: int = 0) -> dict[str, Any]:
        return {"response_id": self._plan.response_id, "output_index": index}

    def _part_address(self, item: AssistantItem) -> dict[str, Any]:
        return {**self._item_address(), "item_id": item.id, "content_index": 0}

    def _response(
        self, details: dict[str, Any] | None = None, end: TurnDone | None = None
    ) -> dict[str, Any]:
        plan, config = self._plan, self._plan.config
        output = {"format": config.output_format.to_json(), "voice": config.voice}
        return {
            "id": plan.response_id,
            "object": "realtime.response",
            "status": self.status,
            "status_details": details,
            "output": [item.to_json() for item in self._output()],
            "conversation_id": self._conversation.id if plan.in_conversation else None,
            "output_modalities": list(config.output_modalities),
            "max_output_tokens": config.max_output_tokens or "inf",
            "audio": {"output": output},
            "metadata": plan.metadata,
            "usage": usage_to_wire(end.usage) if end else None,
        }


def usage_to_wire(usage: Usage) -> dict[str, Any]:
    input_tokens = usage.input_text_tokens + usage.input_audio_tokens
    output_tokens = usage.output_text_tokens + usage.output_audio_tokens
    return {
        "total_tokens": input_tokens + output_tokens,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "input_token_details": {
            "text_tokens": usage.input_text_tokens,
            "audio_tokens": usage.input_audio_tokens,
            "image_tokens": 0,
            "cached_tokens": usage.cached_tokens,
        },
        "output_token_details": {
            "text_tokens": usage.output_text_tokens,
            "audio_tokens": usage.output_audio_tokens,
        },
    }


# --- one response, from response.created until its audio has been heard ---


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
