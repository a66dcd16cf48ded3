"""Functions that a response has to call: a grammar enforces their parameters' schemas.

In: the functions that a tool_choice forces. Out: nothing, or ParameterError with what the grammar
cannot enforce. Without this check a response could end with arguments that do not fit, and the
client would get no call. What the grammar (xgrammar) enforces is tested in
test/unit/models/grammars/test_call_grammar.py.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import orjson

from sglang_live.errors import BadInputError
from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.native import grammars
from sglang_live.gateway.tool_schema import KEYWORDS, parts_of, target_of
from sglang_live.models.grammars.call_grammar import arguments_rules

_NEVER = frozenset(
    (
        *("uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else"),
        *("dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
    )
)
# These decide alone: xgrammar ignores all keywords beside them.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LENGTHS = ("minLength", "maxLength")
_ONLY_WITH_TYPE = frozenset(
    (
        *(*_LIMITS, *_LENGTHS, "pattern", "minItems", "maxItems"),
        *("minProperties", "maxProperties"),
    )
)
_TABLES, _LISTS = ("properties", "patternProperties"), ("anyOf", "oneOf", "allOf", "prefixItems")


def check_enforceable(tools: list[dict[str, Any]], at: str) -> None:
    """
    Args:
        tools: in the realtime protocol's form, with valid schemas.
        at: the path of the tool_choice.
    Raises:
        ParameterError: the grammar of a call of one of the tools cannot be made, or is too large.
    """
    for tool in tools:
        parameters = tool.get("parameters") or {}
        if parameters.get("type", "object") != "object":
            raise ParameterError(at, f"the parameters of {tool['name']} must be an 'object'.")
        for place, part in parts_of(parameters):
            fault = next(_unenforced(part), None) if isinstance(part, dict) else None
            if isinstance(part, dict) and not are_disjoint(parameters, part.get("oneOf", [])):
                fault = "'oneOf' of schemas that one value may fit"
            if fault is not None:
                raise ParameterError(
                    at,
                    f"of {tool['name']}, {fault} at {place} cannot be enforced; with 'auto' the "
                    "function can be called.",
                )
        grammars.schema(parameters, at)
        try:
            arguments_rules(tool["name"], parameters, "")
        except BadInputError as error:
            raise ParameterError(at, str(error)) from None


def _unenforced(part: dict[str, Any]) -> Iterator[str]:
    """Describe what the grammar of one schema would leave out."""
    alone = next((name for name in _ALONE if name in part), None)
    for name, value in part.items():
        if name in _NEVER and value is not False:
            yield f"{name!r}"
        if name not in KEYWORDS or name == alone:
            continue
        if alone and (name != "type" or alone not in ("const", "enum")):
            yield f"{name!r} beside {alone!r}"
        if name in _ONLY_WITH_TYPE and "type" not in part:
            yield f"{name!r} without 'type'"
        if name in _LIMITS and _allows(part, "integer") and not _is_whole(value):
            yield f"{name!r} of an integer that is no whole number"
        if name in ("pattern", "format") and any(length in part for length in _LENGTHS):
            yield f"{name!r} beside a length"
    yield from _unenforced_forms(part)


def _unenforced_forms(part: dict[str, Any]) -> Iterator[str]:
    inner = [part.get("propertyNames")]
    for name in _TABLES:
        inner += part.get(name, {}).values()
    for name in _LISTS:
        inner += part.get(name, ())
    if any(one is False for one in inner):
        yield "the schema 'false'"
    if isinstance(part.get("items"), list):
        yield "a list of 'items'"
    if len(part.get("allOf", ())) > 1:
        yield "'allOf' of several schemas"
    if "multipleOf" in part and _allows(part, "number"):
        yield "'multipleOf' of a number"
    if part.get("additionalProperties") and not all(map(str.isascii, part.get("properties", {}))):
        yield "'additionalProperties' beside a name beyond ASCII"
    if _least_undeclared(part) > 1:
        yield "'minProperties' of several names that are not declared"
    if undeclared := set(part.get("required", ())) - set(part.get("properties", {})):
        yield f"'required' of {min(undeclared)!r}, which is not in 'properties',"


def _least_undeclared(part: dict[str, Any]) -> int:
    """Properties that must have names of the model's choice, of which two could be the same."""
    if "properties" in part and not (
        part.get("patternProperties") or part.get("additionalProperties")
    ):
        return 0
    return int(part.get("minProperties", 0)) - len(part.get("required", ()))


def _allows(part: dict[str, Any], name: str) -> bool:
    types = part.get("type", ())
    return name in (types if isinstance(types, list) else [types])


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and value == int(value)


# --- whether one value may fit two schemas: a grammar enforces the `oneOf` of others ---


_MOST_DEPTH = 8
_KINDS = {
    "NoneType": "null",
    "bool": "boolean",
    "int": "number",
    "float": "number",
    "str": "string",
    "list": "array",
    "dict": "object",
}
_ALL = frozenset(_KINDS.values())


def are_disjoint(root: dict[str, Any], schemas: list[Any]) -> bool:
    return not any(_may_share(root, one, other, 0) for one, other in combinations(schemas, 2))


def _may_share(root: dict[str, Any], one: Any, other: Any, depth: int) -> bool:
    one, other = _followed(root, one), _followed(root, other)
    if depth > _MOST_DEPTH or not isinstance(one, dict) or not isinstance(other, dict):
        return True
    kinds = _kinds(one) & _kinds(other)
    if not kinds:
        return False
    values = [_values(one), _values(other)]
    if values[0] is not None and values[1] is not None:
        return bool(values[0] & values[1])
    if kinds != {"object"}:
        return True
    both = set(one.get("required", ())) & set(other.get("required", ()))
    mine, its = one.get("properties", {}), other.get("properties", {})
    return all(
        _may_share(root, mine[name], its[name], depth + 1)
        for name in both
        if name in mine and name in its
    )


def _followed(root: dict[str, Any], schema: Any) -> Any:
    for _ in range(_MOST_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = target_of(root, schema["$ref"])
    return schema


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    values = _listed(schema)
    if values is not None:
        return frozenset(_KINDS[type(value).__name__] for value in values)
    types = schema.get("type")
    if types is None:
        return _ALL
    names = types if isinstance(types, list) else [types]
    return frozenset("number" if name == "integer" else name for name in names)


def _values(schema: dict[str, Any]) -> set[bytes] | None:
    values = _listed(schema)
    return None if values is None else {_written(value) for value in values}


def _listed(schema: dict[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _written(value: Any) -> bytes:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1.0 and 1 are the same number
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
