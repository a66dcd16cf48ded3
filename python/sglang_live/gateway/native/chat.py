"""Fields of /v1/chat/completions that may reach SGLang's chat template."""

from typing import Any

from sglang_live.gateway.native import grammars
from sglang_live.gateway.native.checks import (
    Check,
    ParameterError,
    boolean,
    fields,
    integer,
    list_of,
    one_of,
    text,
)
from sglang_live.gateway.native.limits import NativeLimits

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_MESSAGES, _MAX_PARTS, _MAX_TOOLS = 4_096, 256, 128
_NAME = text(512)


def chat_fields(limits: NativeLimits) -> dict[str, Check]:
    return {
        "model": _NAME,
        "messages": _messages(limits),
        "tools": list_of(_tool, most=_MAX_TOOLS),
        "tool_choice": _tool_choice,
        "reasoning_effort": one_of(*_EFFORTS),
        "continue_final_message": boolean,
        # `chat_template` is left out: SGLang would run the client's template.
        "chat_template_kwargs": fields({"enable_thinking": boolean, "thinking": boolean}),
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


def _messages(limits: NativeLimits) -> Check:
    several = list_of(_message(limits), most=_MAX_MESSAGES, least=1)

    def check(value: Any, at: str) -> list[Any]:
        found = several(value, at)
        if sum(_n_chars(message["content"]) for message in found if "content" in message) > (
            limits.max_text_chars
        ):
            raise ParameterError(at, f"hold more than {limits.max_text_chars} characters.")
        return found

    return check


def _n_chars(content: Any) -> int:
    return (
        len(content) if isinstance(content, str) else sum(len(p.get("text", "")) for p in content)
    )


def _message(limits: NativeLimits) -> Check:
    long_text = text(limits.max_text_chars)
    function_call = fields(
        {
            "id": _NAME,
            "index": integer(0, _MAX_TOOLS),  # SGLang writes it in its responses
            "type": one_of("function"),
            "function": fields({"name": _NAME, "arguments": long_text}, required=("name",)),
        },
        required=("function",),
    )
    parts = list_of(_part(limits), most=_MAX_PARTS)
    check_fields = fields(
        {
            "role": one_of(*_ROLES),
            "content": lambda v, at: long_text(v, at) if isinstance(v, str) else parts(v, at),
            "name": _NAME,
            "tool_call_id": _NAME,
            "tool_calls": list_of(function_call, most=_MAX_TOOLS),
            "reasoning_content": long_text,
        },
        required=("role",),
        dropped=("refusal", "annotations"),
    )

    def check(value: Any, at: str) -> dict[str, Any]:
        message = check_fields(value, at)
        if message["role"] == "user" and "content" not in message:
            raise ParameterError(f"{at}.content", "is missing.")
        return message

    return check


def _part(limits: NativeLimits) -> Check:
    url = text(2**26, least=1)
    tables: dict[str, dict[str, Check]] = {
        "text": {"text": text(limits.max_text_chars)},
        "input_audio": {
            "input_audio": fields(
                {"data": url, "format": one_of("wav", "mp3")}, required=("data", "format")
            )
        },
        "audio_url": {"audio_url": fields({"url": url}, required=("url",))},
    }
    if limits.takes_images:
        image = {"url": url, "detail": one_of("auto", "low", "high")}
        tables["image_url"] = {"image_url": fields(image, required=("url",))}
        tables["video_url"] = {"video_url": fields({"url": url}, required=("url",))}

    def check(value: Any, at: str) -> dict[str, Any]:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in tables:
            raise ParameterError(f"{at}.type", f"must be one of {list(tables)} for this model.")
        table = tables[kind] | {"type": one_of(kind)}
        return fields(table, required=tuple(tables[kind]))(value, at)

    return check


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
