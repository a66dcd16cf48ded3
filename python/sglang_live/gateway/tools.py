"""Functions that a client declares: read and checked, shown to the model, and called by it.

In: tools and a choice as clients write them; function calls as the model writes them.
Out: Tools for a turn; FunctionCalls, or errors. A malformed function call is never sent as one.
"""

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from sglang_live.core import Tools
from sglang_live.errors import LiveError
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.forced_call import check_enforceable
from sglang_live.gateway.json_forms import missing_parameter, unknown_parameter
from sglang_live.gateway.tool_schema import (
    SchemaFaultError,
    TooManyStepsError,
    check_schema,
    fault_in,
)
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# All functions together, as the model reads them: a longer list would delay every response.
MAX_TOOLS_BYTES = 1 << 16
_ECHO_DEPTH = 8  # levels of JSON around the tools in session.updated, with a margin

# As in OpenAI's API. A name goes to the model, to metrics of clients and to the log.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEPT = ("type", "name", "description", "parameters")
# `strict` has no effect: a call whose arguments do not fit is never sent to the client.
_KEYS = frozenset((*_KEPT, "strict"))
_CHOICE_KEYS = frozenset(("type", "name"))
_CHOICES = ("auto", "none", "required")


class MalformedCallError(LiveError):
    """What the model wrote as a function call is not a call of a function of the session."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """arguments: JSON text of an object that fits the function's parameters."""

    name: str
    arguments: str


# --- declarations of a client ---


def read_tools(value: list[dict[str, Any]], path: str) -> tuple[dict[str, Any], ...]:
    """Read the tools of the realtime protocol.

    Raises:
        ClientEventError: a tool is no function, a name occurs twice, or parameters are no JSON
            schema.
    """
    for index, tool in enumerate(value):
        at = f"{path}[{index}]"
        if tool.get("type") != "function":
            raise ClientEventError("Only function tools are supported.", param=f"{at}.type")
        check_keys(tool, _KEYS, at)
        check_name(tool.get("name"), f"{at}.name")
        if not isinstance(tool.get("description") or "", str):
            raise ClientEventError("A description is a string.", param=f"{at}.description")
        if not isinstance(tool.get("strict"), bool | None):
            raise ClientEventError("strict is true or false.", param=f"{at}.strict")
    tools = tuple({key: tool[key] for key in _KEPT if tool.get(key) is not None} for tool in value)
    check_tools(tools, path=path)
    return tools


def read_choice(value: str | dict[str, Any], path: str) -> str | dict[str, Any]:
    """Read the tool_choice of the realtime protocol.

    Raises:
        ClientEventError: the choice is neither a word of the protocol nor a named function.
    """
    if isinstance(value, str):
        if value not in _CHOICES:
            raise ClientEventError(f"Unknown tool_choice {cut(value)!r}.", param=path)
        return value
    if value.get("type") != "function":
        raise ClientEventError("tool_choice must name a function.", param=f"{path}.type")
    check_keys(value, _CHOICE_KEYS, path)
    name = value.get("name")
    if name is None:
        raise missing_parameter(f"{path}.name")
    if not isinstance(name, str):
        raise ClientEventError("tool_choice must name a function.", param=f"{path}.name")
    return {"type": "function", "name": name}


def check_keys(value: dict[str, Any], known: frozenset[str], path: str) -> None:
    """Raises ClientEventError if a key is not in `known`."""
    for key in value:
        if key not in known:
            raise unknown_parameter(f"{path}.{key}")


def check_name(name: Any, path: str) -> None:
    """Raises ClientEventError if a function cannot have this name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClientEventError(
            f"{path}: a function's name has 1 to 64 letters, digits, '_' or '-'.", param=path
        )


def check_tools(tools: tuple[dict[str, Any], ...], *, path: str, inner: str = "") -> None:
    """Check all functions of a session or request together.

    Args:
        inner: path from a tool to its fields.
    Raises:
        ClientEventError: too many bytes in all, a name occurs twice, or parameters are no JSON
            schema.
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


def check_choice(tools: tuple[dict[str, Any], ...], choice: Any, *, path: str) -> None:
    """Check a choice among the functions.

    Raises:
        ClientEventError: it names a function that is not declared, or forces a call whose
            parameters no grammar can enforce.
    """
    if not has_chosen(tools, choice):
        raise ClientEventError(f"There is no function {choice['name']!r}.", param=path)
    if choice in ("auto", "none"):
        return
    forced = [tool for tool in tools if choice == "required" or tool["name"] == choice["name"]]
    check_enforceable(forced, path)


def has_chosen(tools: tuple[dict[str, Any], ...], choice: Any) -> bool:
    """Returns False if the choice names a function that is not declared."""
    return not isinstance(choice, dict) or choice["name"] in {tool["name"] for tool in tools}


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
    # The echo in session.updated nests the tool deeper, and the JSON writer's depth is limited.
    deeper: Any = tool
    for _ in range(_ECHO_DEPTH):
        deeper = [deeper]
    try:
        return len(orjson.dumps(deeper)) - 2 * _ECHO_DEPTH
    except orjson.JSONEncodeError as error:  # too deep, or a number beyond 64 bits
        raise ClientEventError(f"Cannot be represented: {error}.", param=path) from None


# --- the model's view, and its function calls ---


def tools_of(tools: tuple[dict[str, Any], ...], choice: str | dict[str, Any]) -> Tools:
    """The functions of a turn. choice: the protocol's tool_choice, already checked."""
    if choice == "none" or not tools:
        return Tools()
    keys = ("name", "description", "parameters")
    shown = [{key: tool[key] for key in keys if key in tool} for tool in tools]
    must_call = "" if choice == "required" else None
    if isinstance(choice, dict):
        must_call = choice["name"]
    functions = tuple(orjson.dumps(tool).decode() for tool in shown)
    return Tools(functions=functions, must_call=must_call)


def read_calls(
    written: Iterable[str],
    tools: tuple[dict[str, Any], ...],
    *,
    most: int | None,
    metrics: GatewayMetrics,
    response_id: str,
) -> tuple[list[FunctionCall], str]:
    """The function calls of one response, and the text of those that are none.

    Args:
        most: calls that the client takes; the others are only counted.
    """
    calls: list[FunctionCall] = []
    malformed: list[str] = []
    for text in written:
        try:
            calls.append(read_function_call(text, tools))
        except MalformedCallError as error:
            log.warning("tool_call_malformed response=%s: %r", response_id, str(error))
            malformed.append(text)
    made = calls[:most]
    metrics.tool_calls.labels("made").inc(len(made))
    metrics.tool_calls.labels("malformed").inc(len(malformed))
    metrics.tool_calls.labels("surplus").inc(len(calls) - len(made))
    return made, "\n".join(malformed)


def read_function_call(text: str, tools: tuple[dict[str, Any], ...]) -> FunctionCall:
    """Read and check a function call of the model.

    Args:
        text: the text between the tags of the call.
    Raises:
        MalformedCallError: the text is not a call of one of the tools; the message says why.
    """
    try:
        call = json.loads(text)  # integers of any length, unlike orjson's
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"A function call is not JSON: {error}.") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedCallError("A function call has no name.")
    tool = next((tool for tool in tools if tool["name"] == call["name"]), None)
    if tool is None:
        raise MalformedCallError(f"There is no function {cut(call['name'])!r}.")
    arguments = _arguments(call)
    try:
        # Faults go to the log, so they quote no argument: those repeat what the user said.
        fault = fault_in(arguments, tool.get("parameters") or {})
        written = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    except SchemaFaultError as error:
        raise MalformedCallError(f"Parameters of {tool['name']}: {error}") from None
    except (TooManyStepsError, orjson.JSONEncodeError):
        raise MalformedCallError(f"Arguments of {tool['name']} are too much to check.") from None
    if fault is not None:
        raise MalformedCallError(f"Arguments of {tool['name']}: {fault}.")
    return FunctionCall(tool["name"], written)


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):  # some models write them as JSON within a JSON string
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise MalformedCallError(f"Arguments are not JSON: {error}.") from None
    if not isinstance(arguments, dict):
        raise MalformedCallError("Arguments are not an object.")
    return arguments
