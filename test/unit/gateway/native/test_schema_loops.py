"""JSON schemas that refer to themselves: those that can end pass, the others are refused."""

import json
import time

import pytest

from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.native.grammars import json_schema, schema, structural_tag

SELF = {"$ref": "#"}


def named(name: str) -> dict:
    return {"$ref": f"#/$defs/{name}"}


ENDLESS = {
    "itself": SELF,
    "a ring of two": {"$defs": {"a": named("b"), "b": named("a")}, "$ref": "#/$defs/a"},
    "a ring of 200": {
        "$defs": {f"d{n}": named(f"d{(n + 1) % 200}") for n in range(200)},
        "$ref": "#/$defs/d0",
    },
    "one choice": {"anyOf": [SELF]},
    "choices of itself": {"oneOf": [SELF, {"anyOf": [SELF, SELF]}]},
    "itself and more": {"allOf": [SELF, {"type": "string"}]},
    "in a property": {
        "$defs": {"a": named("a")},
        "type": "object",
        "properties": {"x": named("a")},
    },
    "two properties that are each other": {
        "type": "object",
        "properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}},
    },
    "in a list": {"type": "array", "items": {"$ref": "#/items"}},
}
WITH_END = {
    "a list of itself": {"type": "array", "items": SELF},
    "a tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": named("node"), "right": named("node")},
            }
        },
        "$ref": "#/$defs/node",
    },
    "itself or null": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": SELF}}]},
    "itself or a word": {"anyOf": [SELF, {"type": "string"}]},
    "a long way": {
        "$defs": {f"d{n}": named(f"d{n + 1}") for n in range(1500)} | {"d1500": {"type": "null"}},
        "$ref": "#/$defs/d0",
    },
    "twice the same": {"type": "object", "properties": {"a": named("x"), "b": named("x")}}
    | {"$defs": {"x": {"type": "string"}}},
    "anything": {"anyOf": [True, SELF]},
    "an example that looks like one": {"type": "string", "examples": [{"$ref": "#/examples"}]},
}


@pytest.mark.parametrize("endless", ENDLESS.values(), ids=ENDLESS)
def test_a_schema_that_refers_only_to_itself_is_refused(endless):
    for check, written in (
        (schema, endless),
        (json_schema, json.dumps(endless)),
        (
            structural_tag,
            json.dumps({"format": {"type": "json_schema", "json_schema": endless}}),
        ),
    ):
        with pytest.raises(ParameterError, match="refers to itself") as refused:
            check(written, "at")
        assert str(refused.value).startswith("at")


@pytest.mark.parametrize("with_end", WITH_END.values(), ids=WITH_END)
def test_a_schema_that_writes_something_before_it_reaches_itself_passes(with_end):
    assert schema(with_end, "at") == with_end


def test_references_that_double_at_each_step_are_checked_in_linear_time():
    doubling = {
        f"d{n}": {"allOf": [named(f"d{n + 1}"), named(f"d{n + 1}")]} for n in range(500)
    } | {"d500": {"type": "string"}}
    began_s = time.process_time()
    schema({"$defs": doubling, "$ref": "#/$defs/d0"}, "at")
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize("count", [{"minProperties": 250}, {"maxProperties": 400}])
def test_only_many_counted_properties_are_refused(count):
    def of(n: int, **counts) -> dict:
        names = {f"p{i}": {"type": "string"} for i in range(n)}
        return {"type": "object", "properties": names} | counts

    several = {"type": "array", "prefixItems": [of(60, **count), of(60, **count)]}
    for counted in (of(500, **count), several):
        with pytest.raises(ParameterError, match="too many properties"):
            schema(counted, "at")
    for fine in (of(500), of(500, minProperties=1), of(60, **count), of(5, maxProperties=1024)):
        assert schema(fine, "at") == fine
