"""Conversion of a client's item form into an item of the conversation.

In: ItemForm. Out: Item, or ClientEventError with the path of the faulty field.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import orjson

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.gateway.audio.codec import WireFormat, decode_base64, decode_clip
from sglang_live.gateway.beta_names import ga_part
from sglang_live.gateway.call.conversation.items import (
    AudioContent,
    Content,
    FunctionItem,
    Item,
    MessageItem,
    MessageRole,
    TextContent,
    TextKind,
    call_as_text,
)
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import missing_parameter
from sglang_live.gateway.pictures import check_number, read_picture
from sglang_live.gateway.realtime.events import (
    ContentForm,
    FunctionCallForm,
    FunctionCallOutputForm,
    ItemForm,
    ItemReference,
    MessageForm,
)
from sglang_live.gateway.tools import check_name
from sglang_live.ids import new_id

ContentKind = TextKind | Literal["input_audio", "input_image"]

# Of one item: more than any model reads, and short enough to be echoed to the client.
MAX_TEXT_CHARACTERS = 1 << 20
_MAX_PARTS = 256

_CONTENT_OF_ROLE: dict[str, tuple[ContentKind, ...]] = {
    "system": ("input_text",),
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text",),
}
# Where a part has its content; others have a text.
_FIELDS = {"input_audio": "audio", "input_image": "image_url"}
_ROLES: dict[str, MessageRole] = {"system": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Input:
    """What of a client's message can be read.

    max_bytes: audio, or one picture, in one event, decoded from base64.
    sees: whether the model takes pictures.
    """

    audio_format: WireFormat
    max_bytes: int
    sees: bool


async def build_item(
    form: ItemForm, given: Input, *, path: str, call_ids: Mapping[str, bool]
) -> Item:
    """Check a client's item and decode its audio and pictures.

    Args:
        path: place of the item in the event, for errors.
        call_ids: whether a function call has an output, by its id.
    Raises:
        ClientEventError: unknown role, content that the role cannot have, arguments that are not
            JSON, or an output without a function call or a second one.
    """
    item_id = form.id or new_id("item")
    check_text(_characters(form), path)
    if isinstance(form, FunctionCallForm):
        check_name(form.name, f"{path}.name")
        check_arguments(form.arguments, f"{path}.arguments")
        return _function_call(item_id, form)
    if isinstance(form, FunctionCallOutputForm):
        if form.call_id not in call_ids:
            raise ClientEventError(
                f"Tool call ID '{cut(form.call_id)}' not found in conversation.",
                code="invalid_tool_call_id",
                param=f"{path}.call_id",
            )
        if call_ids[form.call_id]:
            raise ClientEventError(
                f"Tool call ID '{cut(form.call_id)}' already has an output.",
                code="invalid_tool_call_id",
                param=f"{path}.call_id",
            )
        return _function_call_output(item_id, form)
    role = _ROLES.get(form.role)
    if role is None:
        raise ClientEventError(f"Unknown role {cut(form.role)!r}.", param=f"{path}.role")
    if len(form.content) > _MAX_PARTS:
        raise ClientEventError(f"At most {_MAX_PARTS} parts.", param=f"{path}.content")
    check_number(sum(part.type == "input_image" for part in form.content), f"{path}.content")
    content = [
        await _content(part, form, given, f"{path}.content[{index}]")
        for index, part in enumerate(form.content)
    ]
    return MessageItem(item_id, role, content)


def check_text(n_characters: int, path: str) -> None:
    """Raises ClientEventError if a text has more than MAX_TEXT_CHARACTERS."""
    if n_characters > MAX_TEXT_CHARACTERS:
        raise ClientEventError(
            f"{n_characters} characters of text: at most {MAX_TEXT_CHARACTERS}.",
            code="text_too_large",
            param=path,
        )


def check_arguments(text: str, path: str) -> None:
    """Raises ClientEventError if arguments are no JSON object. Empty text and null are valid."""
    try:
        arguments = orjson.loads(text or "null")
    except orjson.JSONDecodeError as error:
        raise ClientEventError(f"{path} must be JSON: {error}.", param=path) from None
    if not isinstance(arguments, dict | None):
        raise ClientEventError(f"{path} must be a JSON object.", param=path)


def _characters(form: ItemForm) -> int:
    if isinstance(form, FunctionCallForm):
        return len(form.name) + len(form.arguments)
    if isinstance(form, FunctionCallOutputForm):
        return len(form.output)
    return sum(len(part.text or "") + len(part.transcript or "") for part in form.content)


async def _content(part: ContentForm, form: MessageForm, given: Input, path: str) -> Content:
    kinds = _CONTENT_OF_ROLE[form.role]
    if not given.sees:
        kinds = tuple(kind for kind in kinds if kind != "input_image")
    kind = next((kind for kind in kinds if kind == part.type), None)
    if kind is None:
        allowed = " or ".join(kinds)
        known = ga_part(form.role, part.type)
        hint = f" The protocol has '{known}'." if known else ""
        if part.type == "input_image" and form.role == "user":
            hint = " This model sees no pictures."
        raise ClientEventError(
            f"Content {cut(part.type)!r} is not supported in a {form.role} message, only "
            f"{allowed}.{hint}",
            code="unsupported_content_type",
            param=f"{path}.type",
        )
    field = _FIELDS.get(kind, "text")
    value = getattr(part, field)
    if value is None:
        raise missing_parameter(f"{path}.{field}")
    if kind == "input_image":
        read = partial(read_picture, max_bytes=given.max_bytes, path=f"{path}.{field}")
        return await asyncio.to_thread(read, value, part.detail)
    if kind != "input_audio":
        return TextContent(kind, value)
    form_of = given.audio_format
    raw = decode_base64(value, form_of, max_bytes=given.max_bytes, param=f"{path}.audio")
    return AudioContent(AudioPart(decode_clip(raw, form_of)), part.transcript)


def _function_call(item_id: str, form: FunctionCallForm) -> FunctionItem:
    fields = {
        "name": form.name,
        "call_id": form.call_id or new_id("call"),
        "arguments": form.arguments,
    }
    history = call_as_text(form.name, form.arguments)
    return FunctionItem(item_id, "function_call", fields, history)


def _function_call_output(item_id: str, form: FunctionCallOutputForm) -> FunctionItem:
    fields = {"call_id": form.call_id, "output": form.output}
    history = HistoryItem(key=new_id("key"), role="tool", parts=(TextPart(form.output),))
    return FunctionItem(item_id, "function_call_output", fields, history)


def place_in(form: ItemForm | ItemReference) -> str:
    """Where an item's content is, from the item's place in the event."""
    match form:
        case FunctionCallOutputForm():
            return ".output"
        case FunctionCallForm():
            return ".arguments"
        case MessageForm(content=[part]):
            return f".content[0].{_FIELDS.get(part.type, 'text')}"
        case MessageForm():
            return ".content"
    return ".id"
