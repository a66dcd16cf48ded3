"""Functions and the choice among them, as clients write them in the realtime protocol.

In: JSON objects. Out: tools and a choice in the form in which the gateway keeps them, or
ClientEventError with the path of what is wrong.
"""

import re
from typing import Any

from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import missing_parameter, unknown_parameter
from sglang_live.gateway.tool_calls import check_tools

# As in OpenAI's API. A name goes to the model, to metrics of clients and to the log.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEPT = ("type", "name", "description", "parameters")
# strict: a call that does not fit its parameters is never passed on, whatever it says.
_KEYS = frozenset((*_KEPT, "strict"))
_CHOICE_KEYS = frozenset(("type", "name"))
_CHOICES = ("auto", "none", "required")


def check_keys(value: dict[str, Any], known: frozenset[str], path: str) -> None:
    """Raises ClientEventError: it has a key that is not known."""
    for key in value:
        if key not in known:
            raise unknown_parameter(f"{path}.{key}")


def check_name(name: Any, path: str) -> None:
    """Raises ClientEventError: it is no name that a function can have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClientEventError(
            f"{path}: a function's name has 1 to 64 letters, digits, '_' or '-'.", param=path
        )


def read_tools(value: list[dict[str, Any]], path: str) -> tuple[dict[str, Any], ...]:
    """Raises ClientEventError: other tools than functions, a name twice, no JSON schema."""
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
    """Raises ClientEventError: neither a word of the protocol nor the name of a function."""
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
