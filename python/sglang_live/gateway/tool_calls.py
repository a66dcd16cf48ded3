"""Functions of a session: what the model is told of them, and its calls checked.

In: tools as clients give them; calls as the model wrote them. Out: Tools for a turn; ToolCalls.
What is no call is never spoken and never passed on: it is counted.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from sglang_live.core import Tools
from sglang_live.errors import LiveError
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.tool_schema import (
    SchemaFaultError,
    TooManyStepsError,
    check_schema,
    fault_in,
)

# Of all functions, as the model is told of them: more than it should read before every answer.
MAX_TOOLS_BYTES = 1 << 16
_ECHO_DEPTH = 8  # levels of JSON around the tools in session.updated, with a margin


class MalformedCallError(LiveError):
    """The model wanted to call a function, but what it wrote is no call of one it has."""

    code = "malformed_tool_call"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text of an object that fits the function's parameters."""

    name: str
    arguments: str


def tools_of(tools: tuple[dict[str, Any], ...], choice: str | dict[str, Any]) -> Tools:
    """What a turn is asked with. choice: as the protocol's tool_choice, checked."""
    if choice == "none" or not tools:
        return Tools()
    keys = ("name", "description", "parameters")
    shown = [{key: tool[key] for key in keys if key in tool} for tool in tools]
    must_call = "" if choice == "required" else None
    if isinstance(choice, dict):
        must_call = choice["name"]
    functions = tuple(orjson.dumps(tool).decode() for tool in shown)
    return Tools(functions=functions, must_call=must_call)


def check_tools(tools: tuple[dict[str, Any], ...], *, path: str, inner: str = "") -> None:
    """
    Args:
        inner: what stands between a tool's place and its fields.
    Raises:
        ClientEventError: too much in all, a name twice, or parameters that are no JSON schema.
    """
    n_bytes = sum(_size(tool, f"{path}[{index}]") for index, tool in enumerate(tools))
    if n_bytes > MAX_TOOLS_BYTES:
        raise ClientEventError(
            f"{n_bytes} bytes of tools: at most {MAX_TOOLS_BYTES} in all.",
            code="tools_too_large",
            param=path,
        )
    for index, tool in enumerate(tools):
        try:
            check_schema(tool.get("parameters") or {})
        except SchemaFaultError as fault:
            at = f"{path}[{index}]{inner}.parameters"
            raise ClientEventError(str(fault), param=at) from None
    _check_names_differ(tools, path, inner)


def _check_names_differ(tools: tuple[dict[str, Any], ...], path: str, inner: str) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool["name"] in names:
            raise ClientEventError(
                f"There are two functions named {cut(tool['name'])!r}.",
                param=f"{path}[{index}]{inner}.name",
            )
        names.add(tool["name"])


def _size(tool: dict[str, Any], path: str) -> int:
    deeper: Any = tool
    for _ in range(_ECHO_DEPTH):  # echoes stand deeper than here; the writer's depth is limited
        deeper = [deeper]
    try:
        return len(orjson.dumps(deeper)) - 2 * _ECHO_DEPTH
    except orjson.JSONEncodeError as error:  # too deep, or a number JSON writers cannot hold
        raise ClientEventError(f"Cannot be represented: {error}.", param=path) from None


def check_choice(tools: tuple[dict[str, Any], ...], choice: Any, *, path: str) -> None:
    """Raises ClientEventError: it names a function that is not there."""
    if not has_chosen(tools, choice):
        raise ClientEventError(f"There is no function {choice['name']!r}.", param=path)


def has_chosen(tools: tuple[dict[str, Any], ...], choice: Any) -> bool:
    """False if it names a function that is not there."""
    return not isinstance(choice, dict) or choice["name"] in {tool["name"] for tool in tools}


def read_call(text: str, tools: tuple[dict[str, Any], ...]) -> ToolCall:
    """
    Args:
        text: what stands between the tags of a call.
    Raises:
        MalformedCallError: it says what is wrong.
    """
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedCallError(f"A call is not JSON: {error}.") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedCallError("A call has no name.")
    tool = next((tool for tool in tools if tool["name"] == call["name"]), None)
    if tool is None:
        raise MalformedCallError(f"There is no function {cut(call['name'])!r}.")
    arguments = _arguments(call)
    try:
        # What it says quotes nothing of what the caller said: it goes to the log.
        fault = fault_in(arguments, tool.get("parameters") or {})
        written = orjson.dumps(arguments).decode()
    except SchemaFaultError as error:
        raise MalformedCallError(f"Parameters of {tool['name']}: {error}") from None
    except (TooManyStepsError, orjson.JSONEncodeError):
        raise MalformedCallError(f"Arguments of {tool['name']} are too much to check.") from None
    if fault is not None:
        raise MalformedCallError(f"Arguments of {tool['name']}: {fault}.")
    return ToolCall(tool["name"], written)


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):  # some models write them as text within the text
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise MalformedCallError(f"Arguments are not JSON: {error}.") from None
    if not isinstance(arguments, dict):
        raise MalformedCallError("Arguments are not an object.")
    return arguments
