"""Fields of /v1/chat/completions that may reach SGLang's chat template."""

from typing import Any, get_args

from sglang_live.gateway.chat.answers import SpokenAnswers
from sglang_live.gateway.chat.messages import (
    AudioPart,
    AudioUrlPart,
    CalledFunction,
    MediaUrl,
    Message,
    Messages,
    Part,
    TextPart,
    UrlPart,
    read_messages,
)
from sglang_live.gateway.json_forms import read_value
from sglang_live.gateway.native import grammars
from sglang_live.gateway.native.checks import (
    Check,
    ParameterError,
    boolean,
    fields,
    list_of,
    one_of,
    text,
    without_effect,
)
from sglang_live.gateway.native.limits import NativeLimits

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_TOOLS = 128
_NAME = text(512)


def chat_fields(limits: NativeLimits, answers: SpokenAnswers) -> dict[str, Check]:
    def of_template(name: str, check: Check, neutral: Any) -> Check:
        return check if name in limits.template_reads else without_effect(neutral)

    return {
        "model": _NAME,
        "messages": _messages(limits, answers),
        "tools": list_of(_tool, most=_MAX_TOOLS),
        "tool_choice": _tool_choice,
        "reasoning_effort": of_template("reasoning_effort", one_of(*_EFFORTS), "none"),
        "continue_final_message": boolean,
        # `chat_template` is left out: SGLang would run the client's template.
        "chat_template_kwargs": fields(
            {name: of_template(name, boolean, False) for name in ("enable_thinking", "thinking")}
        ),
    }


def check_continued(body: dict[str, Any]) -> None:
    """Check `continue_final_message`.

    SGLang removes the last message and renders the others, even if there are none.
    """
    messages = body.get("messages", ())
    if not body.get("continue_final_message"):
        return
    last = messages[-1] if messages else {}
    has_text = isinstance(last.get("content"), str) and bool(last["content"])
    if len(messages) < 2 or last.get("role") != "assistant" or not has_text:
        raise ParameterError(
            "continue_final_message", "needs a last message of the assistant, and one before it."
        )


def _messages(limits: NativeLimits, answers: SpokenAnswers) -> Check:
    takes = get_args(UrlPart) if limits.takes_images else (AudioUrlPart,)

    def check(value: Any, at: str) -> list[Any]:
        messages = read_messages(read_value(value, Messages, at), answers, takes)
        return [_as_sglang(message) for message in messages]

    return check


def _as_sglang(message: Message) -> dict[str, Any]:
    content = message.content
    calls = [
        {"id": call.id, "type": "function", "function": _called(call.function)}
        for call in message.tool_calls or ()
    ]
    fields = {
        "role": message.role,
        "content": content if isinstance(content, str) else list(map(_part, message.parts)),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": calls or None,
        "reasoning_content": message.reasoning_content,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _called(function: CalledFunction) -> dict[str, str]:
    # SGLang takes nothing but an object.
    is_none = function.arguments in (None, "", "null")
    return {"name": function.name, "arguments": "{}" if is_none else function.arguments or ""}


def _part(part: Part) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case AudioPart():
            # SGLang has names for two formats, and reads the data.
            audio = {"data": part.input_audio.data, "format": "wav"}
            return {"type": "input_audio", "input_audio": audio}
        case _:
            kind = str(part.__struct_config__.tag)
            url: MediaUrl = getattr(part, kind)
            detail = {"detail": url.detail} if url.detail else {}
            return {"type": kind, kind: {"url": url.url, **detail}}


def _tool(value: Any, at: str) -> dict[str, Any]:
    function = fields(
        {
            "name": text(128, least=1),
            "description": text(65_536),
            "parameters": grammars.schema,
            "strict": boolean,
        },
        required=("name",),
    )
    table = {"type": one_of("function"), "function": function}
    return fields(table, required=("function",))(value, at)


def _tool_choice(value: Any, at: str) -> Any:
    if isinstance(value, str):
        return one_of("auto", "required", "none")(value, at)
    function = fields({"name": _NAME}, required=("name",))
    table = {"type": one_of("function"), "function": function}
    return fields(table, required=("function",))(value, at)
