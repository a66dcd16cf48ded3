"""Functions of a session: what the model is told of them, and its calls checked.

In: tools as clients give them; calls as the model wrote them. Out: Tools for a turn; ToolCalls.
What is no call is never spoken and never passed on: it is counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from jsonschema import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from sglang_live.errors import LiveError
from sglang_live.gateway.event_error import ClientEventError
from sglang_live.orchestrator.history import Tools


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


def check_tools(tools: tuple[dict[str, Any], ...], choice: Any, *, path: str) -> None:
    """Raises ClientEventError: parameters are no JSON schema, or the choice is none of them."""
    for index, tool in enumerate(tools):
        schema, param = tool.get("parameters") or {}, f"{path}.tools[{index}].parameters"
        try:
            if not isinstance(schema, dict):
                raise ClientEventError("Not a JSON schema: no object.", param=param)
            if any(not reference.startswith("#") for reference in _references(schema)):
                raise ClientEventError("A schema may refer to itself only.", param=param)
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            raise ClientEventError(f"Not a JSON schema: {error.message}", param=param) from None
        except RecursionError:
            raise ClientEventError("Not a JSON schema: nested too deep.", param=param) from None
    if isinstance(choice, dict) and choice["name"] not in {tool["name"] for tool in tools}:
        raise ClientEventError(
            f"There is no function {choice['name']!r}.", param=f"{path}.tool_choice"
        )


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
        raise MalformedCallError(f"There is no function {call['name']!r}.")
    arguments = _arguments(call)
    try:
        fault = next(_validator(tool.get("parameters") or {}).iter_errors(arguments), None)
    except (Unresolvable, RecursionError) as error:
        raise MalformedCallError(f"Parameters of {tool['name']}: {error}") from None
    if fault is not None:
        # Not the validator's message: it quotes what the caller said, and this goes to the log.
        raise MalformedCallError(
            f"Arguments of {tool['name']}: {fault.json_path} does not fit {fault.validator!r}."
        )
    return ToolCall(tool["name"], orjson.dumps(arguments).decode())


def _validator(schema: dict[str, Any]) -> Validator:
    """Fetches nothing, matches no pattern: it is a client's, and a pattern can take for ever."""
    schema = _without_patterns(schema)
    return validator_for(schema)(schema, registry=Registry())


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = set()
    if isinstance(schema.get("pattern"), str):  # a property may have that name
        left_out = {"pattern"}
    if "patternProperties" in schema:
        # Without it nobody can tell which properties are additional.
        left_out |= {"patternProperties", "additionalProperties", "unevaluatedProperties"}
    return {k: _without_patterns(v) for k, v in schema.items() if k not in left_out}


def _references(schema: Any) -> Iterator[str]:
    inside = list(schema.values()) if isinstance(schema, dict) else schema
    if isinstance(schema, dict):
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(schema.get(name), str):
                yield schema[name]
    for part in inside if isinstance(inside, list) else ():
        yield from _references(part)


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
