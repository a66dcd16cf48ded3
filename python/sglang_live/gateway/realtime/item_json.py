"""Items of the conversation in the form of the Realtime protocol."""

from typing import Any

from sglang_live.gateway.audio.codec import WireFormat, encode_base64, encode_clip
from sglang_live.gateway.call.conversation.assistant_item import (
    MAX_RETRIEVED_AUDIO_BYTES,
    AssistantItem,
)
from sglang_live.gateway.call.conversation.items import (
    Content,
    FunctionCallItem,
    FunctionItem,
    ImageContent,
    Item,
    MessageItem,
    TextContent,
)


def item_json(item: Item, audio_format: WireFormat | None = None) -> dict[str, Any]:
    """audio_format: of the audio in it; None: without audio and pictures."""
    match item:
        case AssistantItem():
            content = [_spoken(item, with_audio=audio_format is not None)]
            return _wire(item, "message", item.status, role="assistant", content=content)
        case MessageItem():
            content = [_content(part, audio_format) for part in item.content]
            return _wire(item, "message", "completed", role=item.role, content=content)
        case FunctionCallItem():
            call = {"name": item.call.name, "call_id": item.call_id}
            return _wire(item, "function_call", "completed", **call, arguments=item.call.arguments)
        case FunctionItem():
            return _wire(item, item.kind, "completed", **item.fields)
    raise TypeError(f"no form for {type(item).__name__}")


def part_json(item: AssistantItem) -> dict[str, Any]:
    """Its content part in the form of response.content_part.*; its types differ from items."""
    if item.modality == "text":
        return {"type": "text", "text": item.visible_text}
    return {"type": "audio", "transcript": item.visible_text}


def _spoken(item: AssistantItem, *, with_audio: bool) -> dict[str, Any]:
    if item.modality == "text":
        return {"type": "output_text", "text": item.visible_text}
    shown: dict[str, Any] = {"type": "output_audio", "transcript": item.visible_text}
    if with_audio and (audio := item.heard_audio) is not None:
        shown["audio"] = encode_base64(audio)
    return shown


def _content(part: Content, audio_format: WireFormat | None) -> dict[str, Any]:
    if isinstance(part, TextContent):
        return {"type": part.kind, "text": part.text}
    if isinstance(part, ImageContent):
        seen = {"type": "input_image", "detail": part.detail}
        if audio_format and part.size_bytes <= MAX_RETRIEVED_AUDIO_BYTES:
            seen["image_url"] = f"data:image/png;base64,{encode_base64(part.image.png)}"
        return seen
    shown: dict[str, Any] = {"type": "input_audio", "transcript": part.transcript}
    if audio_format:
        duration_ms = part.audio.duration_s * 1000
        if audio_format.n_bytes(duration_ms) <= MAX_RETRIEVED_AUDIO_BYTES:
            shown["audio"] = encode_base64(encode_clip(part.audio.pcm, audio_format))
    return shown


def _wire(item: Item, kind: str, status: str, **fields: Any) -> dict[str, Any]:
    return {"id": item.id, "object": "realtime.item", "type": kind, "status": status, **fields}
