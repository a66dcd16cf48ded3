"""Input items of decisions: their forms, and what the model reads of them."""

from typing import Any, Literal

import orjson

from sglang_live.gateway.json_forms import Strict, read_value, unsupported_parameter
from sglang_live.gateway.live.work import Item, message

_Status = Literal["in_progress", "completed", "incomplete"]


class _Part(Strict):
    """text: of input_text and output_text. data: of input_json. refusal: of refusal."""

    type: Literal["input_text", "output_text", "input_json", "refusal"]
    text: str = ""
    refusal: str = ""
    data: Any = None


class _Message(Strict):
    """id, phase: no effect."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    type: Literal["message"] = "message"
    id: str | None = None
    phase: str | None = None


class _Call(Strict):
    """id, namespace, status: no effect."""

    call_id: str
    name: str
    arguments: str = ""
    input: str = ""
    type: str = ""
    id: str | None = None
    namespace: str | None = None
    status: _Status | None = None


class _Output(Strict):
    """id, status: no effect."""

    call_id: str
    output: str | list[_Part]
    type: str = ""
    id: str | None = None
    status: _Status | None = None


def read_item(sent: dict[str, Any]) -> Item:
    """Raises ClientEventError if it is malformed or not supported."""
    kind = sent.get("type", "message")
    if kind == "message":
        form = read_value(sent, _Message, "item")
        return message(form.role, _text(form.content))
    if kind in ("function_call", "custom_tool_call"):
        call = read_value(sent, _Call, "item")
        written = call.arguments if kind == "function_call" else orjson.dumps(call.input).decode()
        about = {"call_id": call.call_id, "name": call.name, "arguments": written}
        return {"type": "function_call", **about}
    if kind in ("function_call_output", "custom_tool_call_output"):
        result = read_value(sent, _Output, "item")
        output = _text(result.output)
        return {"type": "function_call_output", "call_id": result.call_id, "output": output}
    raise unsupported_parameter("item.type", "is a message, or a call of a function or its output.")


def _text(content: str | list[_Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        orjson.dumps(part.data).decode() if part.type == "input_json" else part.text or part.refusal
        for part in content
    )
