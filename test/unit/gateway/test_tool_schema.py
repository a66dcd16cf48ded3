"""Schemas of functions' parameters: faults in them, validation against them, its cost."""

import jsonschema
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sglang_live.gateway.tool_schema import (
    SchemaFaultError,
    TooManyStepsError,
    check_schema,
    fault_in,
)

from .hostile import ANY, HOSTILE_SCHEMAS, doubled, schemas

# --- the form of a schema ---


@pytest.mark.parametrize(
    "schema",
    [
        5,
        [],
        {"type": "objekt"},
        {"type": {}},
        {"$schema": []},
        {"$schema": {}},
        {"$schema": 5},
        {"properties": {"x": {"$schema": []}}},
        {"properties": []},
        {"properties": {"x": 5}},
        {"required": "x"},
        {"required": [{}]},
        {"enum": 5},
        {"allOf": {"x": {}}},
        {"allOf": []},
        {"minItems": -1},
        {"maxLength": "x"},
        {"multipleOf": 0},
        {"maximum": True},
        {"$ref": 5},
        {"$ref": "#/allOf/x", "allOf": [{}]},
        {"$ref": "#/nowhere"},
        {"$ref": "#name"},
        {"$ref": "#/required", "required": ["x"]},
        {"$ref": "#/x", "x": {"items": 5}},
        {"$ref": "http://127.0.0.1:1/schema.json"},
    ],
    ids=str,
)
def test_a_faulty_schema_is_refused_before_any_validation(schema):
    with pytest.raises(SchemaFaultError):
        check_schema(schema)


def test_the_fault_names_its_place():
    with pytest.raises(SchemaFaultError, match="#/properties/town/anyOf/1/type"):
        check_schema({"properties": {"town": {"anyOf": [{}, {"type": "word"}]}}})


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"$schema": "http://json-schema.org/draft-04/schema#", "required": ["x"]}, {"x": 1}, {}),
        ({"$defs": {"a/b": {"type": "null"}}, "properties": {"x": {"$ref": "#/$defs/a~1b"}}},
         {"x": None}, {"x": 1}),
        ({"properties": {"x": {"$ref": "#"}}, "required": ["y"]},
         {"y": 1, "x": {"y": 2}}, {"y": 1, "x": {}}),
        ({"$id": "http://a/b", "properties": {"x": {"$id": "c", "$ref": "#/$defs/d"}},
          "$defs": {"d": {"type": "string"}}}, {"x": "y"}, {"x": 1}),
        ({"properties": {"x": {"uniqueItems": True}}}, {"x": [{"a": 1}, {}]}, {"x": [{}, {}]}),
        ({"properties": {"$schema": {"type": "string"}}}, {"$schema": "x"}, {"$schema": 5}),
        ({"properties": {"x": {"items": [{"type": "null"}], "minItems": 1}}},
         {"x": [5]}, {"x": []}),
    ],
)  # fmt: skip
def test_arguments_are_validated_against_schemas_of_all_drafts(schema, fits, does_not):
    check_schema(schema)
    assert fault_in(fits, schema) is None
    assert fault_in(does_not, schema) is not None


# --- cost ---


def test_entries_of_a_large_enum_are_not_compared_with_each_other(monkeypatch):
    """The library's comparison of every pair takes seconds."""
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "enum": [{"n": n} for n in range(1500)],
    }
    monkeypatch.setattr(jsonschema._utils, "equal", None)
    check_schema(schema)
    check_schema({"required": ["x"] * 5000, "properties": {"x": {"type": ["null"] * 5000}}})


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (doubled(40), {}),
        ({"$ref": "#", "not": {"$ref": "#"}}, {}),
        ({"$ref": "#"}, {}),
        ({"properties": {"x": {"items": {"not": {"enum": [{"n": n} for n in range(4000)]}}}}},
         {"x": [0] * 4000}),
        ({"properties": {"x": {"allOf": [{"items": {}}] * 4000}}}, {"x": [0] * 4000}),
        ({"$defs": {"no": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/no"}] * 3000},
         {"x": [[0] * 4000]}),
    ],
    ids=["doubling", "self and not", "self", "enum", "items", "quoted"],
)  # fmt: skip
def test_validation_that_takes_too_long_is_stopped(schema, arguments):
    check_schema(schema)
    with pytest.raises(TooManyStepsError):
        fault_in(arguments, schema)


def test_arguments_as_long_as_a_response_can_hold_are_validated():
    item = {
        "type": "object",
        "properties": {f"field_{n}": {"type": "string", "maxLength": 40} for n in range(15)},
        "required": [f"field_{n}" for n in range(15)],
        "additionalProperties": False,
    }
    schema = {"properties": {"found": {"type": "array", "items": item}}}
    found = [{f"field_{n}": "a word or two" for n in range(15)} for _ in range(100)]
    assert fault_in({"found": found}, schema) is None
    assert fault_in({"found": [*found, {}]}, schema) == "$.found[100] does not fit 'required'"


# --- arbitrary schemas ---


@settings(max_examples=300, derandomize=True)
@given(
    schemas() | st.sampled_from(HOSTILE_SCHEMAS),
    st.dictionaries(st.sampled_from("xy"), ANY, max_size=2),
)
def test_any_schema_is_refused_or_validates_any_arguments(schema, arguments):
    try:
        check_schema(schema)
    except SchemaFaultError as fault:
        assert str(fault)
        return
    try:
        fault = fault_in(arguments, schema)
    except TooManyStepsError:
        assert "#" in str(orjson.dumps(schema))  # only recursive schemas take that long
        return
    assert fault is None or "does not fit" in fault


@settings(max_examples=200, derandomize=True)
@given(
    st.dictionaries(st.sampled_from(["x", "y"]), ANY, max_size=2),
    st.fixed_dictionaries(
        {},
        optional={
            "required": st.lists(st.sampled_from(["x", "y"]), max_size=2, unique=True),
            "properties": st.fixed_dictionaries({"x": st.sampled_from([
                {"type": "string"}, {"type": ["null", "integer"]}, {"enum": ["x", 1]},
                {"minimum": 1},
                {"anyOf": [{"type": "string"}, {"const": None}]}, {"not": {"type": "array"}}, False,
            ])}),
            "additionalProperties": st.booleans(),
            "maxProperties": st.integers(0, 2),
        },
    ),
)  # fmt: skip
def test_arguments_fit_exactly_when_the_reference_validator_accepts_them(arguments, schema):
    assert (fault_in(arguments, schema) is None) == Draft202012Validator(schema).is_valid(arguments)
