"""Whether a value can fit two schemas at once: a grammar enforces the `oneOf` of those that differ.

In: two schemas of one client. Out: True where nothing shows that no value fits both.
"""

from itertools import combinations
from typing import Any

import orjson

from sglang_live.gateway.tool_schema import target_of

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
