"""The facts of a call as server events of the Realtime protocol.

In: facts (call/ports.py). Out: events in the outbox.
Owner: one RealtimePort per connection.
"""

from base64 import b64decode
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from sglang_live.core import HeardToken, Usage
from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import encode_base64
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.items import FunctionCallItem, Item
from sglang_live.gateway.call.outbox import Emit
from sglang_live.gateway.call.ports import FrameReport
from sglang_live.gateway.call.responses.writer import ResponseWriter
from sglang_live.gateway.errors import error_body
from sglang_live.gateway.rate_limits import RateLimitStatus
from sglang_live.gateway.realtime.item_json import item_json, part_json
from sglang_live.gateway.transcribe import logprobs_json
from sglang_live.gateway.webrtc.sound import CallSound

_AUDIO_BUFFER = "input_audio_buffer."
_TRANSCRIPT = "conversation.item.input_audio_transcription."
_ARGUMENTS = "response.function_call_arguments."


class RealtimePort:
    def __init__(self, emit: Emit, sound: CallSound | None = None):
        """sound: takes the audio; None: audio is events."""
        self._emit = emit
        self._sound = sound

    # --- the user ---

    def speech_started(self, start_ms: int, item_id: str) -> None:
        self._emit(_AUDIO_BUFFER + "speech_started", audio_start_ms=start_ms, item_id=item_id)

    def speech_stopped(self, end_ms: int, item_id: str) -> None:
        self._emit(_AUDIO_BUFFER + "speech_stopped", audio_end_ms=end_ms, item_id=item_id)

    def turn_committed(self, item_id: str, previous_id: str | None, duration_ms: float) -> None:
        self._emit(_AUDIO_BUFFER + "committed", previous_item_id=previous_id, item_id=item_id)

    def audio_cleared(self) -> None:
        self._emit(_AUDIO_BUFFER + "cleared")

    def user_is_idle(self, start_ms: int, end_ms: int, item_id: str) -> None:
        self._emit(
            _AUDIO_BUFFER + "timeout_triggered",
            audio_start_ms=start_ms,
            audio_end_ms=end_ms,
            item_id=item_id,
        )

    def voice_suspected(self, onset_ms: int) -> None:
        self._emit(_AUDIO_BUFFER + "voice_suspected", audio_start_ms=onset_ms)

    def voice_ignored(self, decision: str, reason: str, onset_ms: int, end_ms: int) -> None:
        self._emit(
            _AUDIO_BUFFER + "voice_ignored",
            decision=decision,
            reason=reason,
            audio_start_ms=onset_ms,
            audio_end_ms=end_ms,
        )

    def frame_done(self, report: FrameReport) -> None:
        self._emit(
            "frame.done",
            frame_index=report.index,
            audio_start_ms=report.start_ms,
            audio_end_ms=report.end_ms,
            missing_before=report.n_missing,
            outcome=report.outcome,
            text=report.text,
            output_tokens=report.output_tokens,
            latency_ms=report.latency_ms,
            error=error_body(report.error) if report.error else None,
        )

    def words_heard(self, item_id: str, text: str, start_ms: float, end_ms: float) -> None:
        self._emit(_TRANSCRIPT + "delta", item_id=item_id, content_index=0, delta=text)

    def transcript_completed(
        self,
        item_id: str,
        text: str,
        duration_s: float,
        tokens: Sequence[HeardToken] | None,
    ) -> None:
        usage = {"type": "duration", "seconds": round(duration_s, 3)}
        more: dict[str, Any] = {} if tokens is None else {"logprobs": logprobs_json(tokens)}
        self._emit(
            _TRANSCRIPT + "completed",
            item_id=item_id,
            content_index=0,
            transcript=text,
            usage=usage,
            **more,
        )

    def transcript_failed(self, item_id: str, error: LiveError) -> None:
        self._emit(
            _TRANSCRIPT + "failed", item_id=item_id, content_index=0, error=error_body(error)
        )

    # --- the conversation ---

    def item_added(self, item: Item, previous_id: str | None) -> None:
        for kind in ("added", "done"):
            self._emit(
                f"conversation.item.{kind}", previous_item_id=previous_id, item=item_json(item)
            )

    def item_dropped(self, item_id: str, response_id: str | None) -> None:
        self._emit("conversation.item.deleted", lane=response_id, item_id=item_id)

    def item_truncated(self, item_id: str, heard_ms: int) -> None:
        self._emit(
            "conversation.item.truncated", item_id=item_id, content_index=0, audio_end_ms=heard_ms
        )

    # --- a response: in one lane its events keep their order while its audio is held ---

    def response_created(self, writer: ResponseWriter) -> None:
        self._emit("response.created", lane=writer.id, response=_response(writer))

    def limits_changed(self, limits: RateLimitStatus) -> None:
        self._emit("rate_limits.updated", rate_limits=limits.to_json())

    def item_opened(
        self, writer: ResponseWriter, item: AssistantItem, previous_id: str | None
    ) -> None:
        empty = {**item_json(item), "content": []}
        self._emit(
            "response.output_item.added", lane=writer.id, item=empty, **_item_address(writer)
        )
        self._of_conversation("added", writer, empty, previous_id)
        self._emit(
            "response.content_part.added",
            lane=writer.id,
            part=part_json(item),
            **_part_address(writer, item),
        )

    def text_added(self, writer: ResponseWriter, item: AssistantItem, text: str) -> None:
        kind = "output_text" if item.modality == "text" else "output_audio_transcript"
        address = _part_address(writer, item)
        self._emit(f"response.{kind}.delta", lane=writer.id, delta=text, **address)

    def audio_added(self, writer: ResponseWriter, item: AssistantItem, frame: bytes) -> None:
        if self._sound is not None:
            self._sound.play(writer.id, frame, writer.audio_sent)
            return
        self._emit(
            "response.output_audio.delta",
            lane=writer.id,
            on_sent=partial(writer.audio_sent, frame),
            audio_s=item.audio_format.duration_ms(len(frame)) / 1000,
            delta=encode_base64(frame),
            **_part_address(writer, item),
        )

    def item_closed(
        self, writer: ResponseWriter, item: AssistantItem, previous_id: str | None
    ) -> None:
        lane, address = writer.id, _part_address(writer, item)
        if item.modality == "text":
            self._emit("response.output_text.done", lane=lane, text=item.text, **address)
        else:
            if self._sound is not None:
                self._sound.all_played(writer.id)
            self._emit("response.output_audio.done", lane=lane, **address)
            self._emit(
                "response.output_audio_transcript.done",
                lane=lane,
                transcript=item.text,
                **address,
            )
        self._emit("response.content_part.done", lane=lane, part=part_json(item), **address)
        shown = item_json(item)
        self._emit("response.output_item.done", lane=lane, item=shown, **_item_address(writer))
        if not item.has_left:
            self._of_conversation("done", writer, shown, previous_id)

    def function_called(
        self, writer: ResponseWriter, item: FunctionCallItem, previous_id: str | None
    ) -> None:
        lane, address = writer.id, _item_address(writer, writer.output.index(item))
        shown = item_json(item)
        begun = {**shown, "status": "in_progress", "arguments": ""}
        self._emit("response.output_item.added", lane=lane, item=begun, **address)
        self._of_conversation("added", writer, begun, previous_id)
        of_call = {**address, "item_id": item.id, "call_id": item.call_id}
        arguments = item.call.arguments
        self._emit(_ARGUMENTS + "delta", lane=lane, delta=arguments, **of_call)
        self._emit(
            _ARGUMENTS + "done", lane=lane, arguments=arguments, name=item.call.name, **of_call
        )
        self._emit("response.output_item.done", lane=lane, item=shown, **address)
        self._of_conversation("done", writer, shown, previous_id)

    def response_done(self, writer: ResponseWriter) -> None:
        self._emit("response.done", lane=writer.id, response=_response(writer))
        if self._sound is not None:
            self._sound.response_done(writer.id)

    def _of_conversation(
        self, kind: str, writer: ResponseWriter, item: dict[str, Any], previous_id: str | None
    ) -> None:
        if writer.plan.in_conversation:
            self._emit(
                f"conversation.item.{kind}",
                lane=writer.id,
                previous_item_id=previous_id,
                item=item,
            )


def audio_of(event: bytes) -> bytes:
    """Audio of an output_audio.delta, in its format."""
    return b64decode(orjson.loads(event)["delta"])


def with_audio(event: bytes, audio: bytes, event_id: str) -> bytes:
    """The event with other audio, and another id."""
    changed = {"event_id": event_id, "delta": encode_base64(audio)}
    return orjson.dumps({**orjson.loads(event), **changed})


def _item_address(writer: ResponseWriter, index: int = 0) -> dict[str, Any]:
    return {"response_id": writer.id, "output_index": index}


def _part_address(writer: ResponseWriter, item: AssistantItem) -> dict[str, Any]:
    return {**_item_address(writer), "item_id": item.id, "content_index": 0}


def _response(writer: ResponseWriter) -> dict[str, Any]:
    plan, config = writer.plan, writer.plan.config
    output = {"format": config.output_format.to_json(), "voice": config.voice}
    return {
        "id": plan.response_id,
        "object": "realtime.response",
        "status": writer.status,
        "status_details": _details(writer),
        "output": [item_json(item) for item in writer.output],
        "conversation_id": writer.conversation_id,
        "output_modalities": list(config.output_modalities),
        "max_output_tokens": config.max_output_tokens or "inf",
        "audio": {"output": output},
        "metadata": plan.metadata,
        "usage": _usage(writer.usage) if writer.usage else None,
    }


def _details(writer: ResponseWriter) -> dict[str, Any] | None:
    if writer.error is not None:
        body = error_body(writer.error)
        return {"type": "failed", "error": {key: body[key] for key in ("type", "code", "message")}}
    if writer.status in ("incomplete", "cancelled"):
        return {"type": writer.status, "reason": writer.reason}
    return None


def _usage(usage: Usage) -> dict[str, Any]:
    input_tokens = usage.input_tokens
    output_tokens = usage.output_text_tokens + usage.output_audio_tokens
    return {
        "total_tokens": input_tokens + output_tokens,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "input_token_details": {
            "text_tokens": usage.input_text_tokens,
            "audio_tokens": usage.input_audio_tokens,
            "image_tokens": usage.input_image_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "output_token_details": {
            "text_tokens": usage.output_text_tokens,
            "audio_tokens": usage.output_audio_tokens,
        },
    }
