"""Grammars of forced function calls, and what xgrammar enforces of a schema."""

import json

import pytest
import xgrammar

from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.forced_call import check_enforceable
from sglang_live.models.grammars.call_grammar import call_grammar
from sglang_live.models.tool_prompt import CALL_END

END = 127
VOCABULARY = [*map(chr, range(1, END)), "<end>"]


def accepts(grammar: str, text: str) -> bool:
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[END - 1])
    compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar(grammar)
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(END - 1)


def tool(name: str, parameters: object = None) -> dict:
    return {"name": name} | ({} if parameters is None else {"parameters": parameters})


def taking(schema: dict) -> dict:
    """A function whose argument `x` has the schema."""
    own = {name: value for name, value in schema.items() if name != "$defs"}
    parameters = {"type": "object", "properties": {"x": own}, "required": ["x"]}
    return tool("f", parameters | {"$defs": schema.get("$defs", {})})


def fits(schema: dict, value: object) -> bool:
    grammar = call_grammar((json.dumps(taking(schema)),), "f")
    return accepts(grammar, json.dumps({"x": value}, ensure_ascii=False) + f"}}\n{CALL_END}")


def test_a_named_function_is_called_with_its_arguments_alone():
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    functions = json.dumps(tool("weather", city)), json.dumps(tool("time"))
    grammar = call_grammar(functions, "weather")
    assert accepts(grammar, '{"city": "Paris"}}\n</tool_call>')
    for text in (
        "{}}\n</tool_call>",
        '{"city": 5}}\n</tool_call>',
        '{"city": "Paris"}}',
        '{"city": "Paris"}}\n</tool_call> And',
        '{ "city": "Paris"}}\n</tool_call>',
    ):
        assert not accepts(grammar, text)
    assert accepts(call_grammar(functions, "time"), "{}}\n</tool_call>")


def test_any_of_the_functions_is_called_with_its_own_arguments():
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    functions = json.dumps(tool("dial", number)), json.dumps(tool("hang_up", {}))
    grammar = call_grammar(functions, "")
    assert accepts(grammar, '"dial", "arguments": {"n": 5}}\n</tool_call>')
    assert accepts(grammar, '"hang_up", "arguments": {}}\n</tool_call>')
    for text in (
        '"dial", "arguments": {}}\n</tool_call>',
        '"other", "arguments": {}}\n</tool_call>',
        '"hang_up", "arguments": {"n": 5}}\n</tool_call>',
    ):
        assert not accepts(grammar, text)


INTEGER, NUMBER, STRING = {"type": "integer"}, {"type": "number"}, {"type": "string"}
AB = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
# (a schema, a value that fits, one that does not)
ENFORCED = {
    "anyOf": ({"anyOf": [INTEGER, STRING]}, 1, True),
    "allOf": ({"allOf": [INTEGER]}, 1, "a"),
    "multipleOf": ({**INTEGER, "multipleOf": 5}, 10, 7),
    "minimum": ({**NUMBER, "minimum": 2}, 2.5, 1.5),
    "exclusiveMinimum": ({**NUMBER, "exclusiveMinimum": 2}, 2.5, 2),
    "maximum": ({**NUMBER, "maximum": 2}, 1.5, 2.5),
    "exclusiveMaximum": ({**INTEGER, "exclusiveMaximum": 2}, 1, 2),
    "types": ({"type": ["integer", "null"], "minimum": 3}, None, 1),
    "minLength": ({**STRING, "minLength": 2}, "ab", "a"),
    "maxLength": ({**STRING, "maxLength": 2}, "ab", "abc"),
    "pattern": ({**STRING, "pattern": "^a+$"}, "aa", "b"),
    "format": ({**STRING, "format": "date"}, "2020-01-31", "b"),
    "enum": ({"enum": ["a", 1, None]}, None, "b"),
    "enum of a type": ({**STRING, "enum": ["a"]}, "a", "b"),
    "const": ({"const": "a"}, "a", "b"),
    "prefixItems": ({"type": "array", "prefixItems": [INTEGER], "items": STRING}, [1, "a"], [1, 2]),
    "no items": ({"type": "array", "prefixItems": [INTEGER], "items": False}, [1], [1, 2]),
    "minItems": ({"type": "array", "items": INTEGER, "minItems": 2}, [1, 2], [1]),
    "maxItems": ({"type": "array", "items": INTEGER, "maxItems": 2}, [1, 2], [1, 2, 3]),
    "required": ({**AB, "required": ["b"]}, {"b": 1}, {"a": 1}),
    "additionalProperties": (
        {"type": "object", "additionalProperties": INTEGER},
        {"z": 1},
        {"z": "a"},
    ),
    "no more properties": (AB, {"a": 1}, {"a": 1, "z": 1}),
    "minProperties": ({**AB, "minProperties": 2}, {"a": 1, "b": 1}, {"a": 1}),
    "maxProperties": ({**AB, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "propertyNames": (
        {
            "type": "object",
            "additionalProperties": INTEGER,
            "propertyNames": {**STRING, "maxLength": 1},
        },
        {"a": 1},
        {"ab": 1},
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a$": INTEGER}, "additionalProperties": False},
        {"a": 1},
        {"b": 1},
    ),
    "$ref": ({"$defs": {"n": INTEGER}, "$ref": "#/$defs/n"}, 1, "a"),
}
NOT_ENFORCED = {
    "uniqueItems": ({"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 1]),
    "contains": ({"type": "array", "items": INTEGER, "contains": {"const": 3}}, [1]),
    "not": ({**INTEGER, "not": {"const": 3}}, 3),
    "if": ({**INTEGER, "if": {"const": 3}, "then": {"const": 4}}, 3),
    "dependentRequired": ({**AB, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": ({**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    "several schemas": ({"allOf": [{**INTEGER, "minimum": 0}, {**INTEGER, "maximum": 3}]}, 4),
    "beside 'anyOf'": ({**INTEGER, "anyOf": [{**INTEGER, "minimum": 3}, INTEGER]}, 3),
    "beside '$ref'": ({"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 3}, 1),
    "beside a length": ({**STRING, "maxLength": 2, "pattern": "^a+$"}, "aaa"),
    "without 'type'": ({"minimum": 3}, 1),
    "minProperties": (
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
        {"a": 1, "b": 1},
    ),
    "oneOf": ({"oneOf": [INTEGER, {"type": "number"}]}, 1.5),
    "beyond ASCII": (
        {"type": "object", "properties": {"é": INTEGER}, "additionalProperties": INTEGER},
        {"é": 1},
    ),
    "of a number": ({**NUMBER, "multipleOf": 5}, 7),
    "not in 'properties'": ({**AB, "required": ["z"], "additionalProperties": INTEGER}, {"a": 1}),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_accepted_is_enforced(name):
    schema, fitting, other = ENFORCED[name]
    check_enforceable([taking(schema)], "tool_choice")
    assert fits(schema, fitting)
    assert not fits(schema, other)


@pytest.mark.parametrize("name", NOT_ENFORCED)
def test_what_xgrammar_leaves_out_is_refused_by_name(name):
    schema, other = NOT_ENFORCED[name]
    with pytest.raises(ParameterError, match=r"tool_choice: of f, .* at #/properties/x") as error:
        check_enforceable([taking(schema)], "tool_choice")
    assert name in str(error.value)
    if name != "beyond ASCII":  # which xgrammar cannot read
        assert fits(schema, other)


TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
    for kind in ("a", "b")
]


def test_one_of_schemas_that_differ_is_enforced():
    for sides in (TAGGED, [INTEGER, STRING], [{"const": 1}, {"enum": [2, "1"]}]):
        check_enforceable([taking({"oneOf": sides})], "tool_choice")
    assert fits({"oneOf": TAGGED}, {"kind": "b"})


BARE = {
    "a tab": "\t",
    "a control character": "\x01",
    "half a pair": "\\ud800",
    "a bare quote": 'a"b',
}


@pytest.mark.parametrize("text", BARE.values(), ids=list(BARE))
@pytest.mark.parametrize("schema", [STRING, {**STRING, "maxLength": 9}], ids=["free", "bounded"])
def test_a_string_is_valid_json(schema, text):
    grammar = call_grammar((json.dumps(taking(schema)),), "f")
    assert not accepts(grammar, f'{{"x": "{text}"}}}}\n{CALL_END}')
    assert fits(schema, "plain é")
    assert fits(STRING, 'a "b" \\')


@pytest.mark.parametrize(
    ("pattern", "fitting", "other"),
    [
        (r"^\d{2}:[0-5]\d$", "10:59", "10:60"),
        ("^[^x]+$", 'a "b" \\ é', "ax"),
        ("a|b", "b", "c"),
        ("^(ab|c)*d$", "abcd", "abd "),
        (r'^"\w*"$', '"a"', "a"),
    ],
)
def test_a_pattern_is_enforced_on_the_value(pattern, fitting, other):
    schema = {**STRING, "pattern": pattern}
    check_enforceable([taking(schema)], "tool_choice")
    assert fits(schema, fitting)
    assert not fits(schema, other)


@pytest.mark.parametrize("pattern", ["^a$b|c", "(?=a)b", r"\bfoo", r"(a)\1", "(?i)a", "["])
def test_a_pattern_that_cannot_be_enforced_is_refused(pattern):
    with pytest.raises(ParameterError):
        check_enforceable([taking({**STRING, "pattern": pattern})], "tool_choice")


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({**INTEGER, "minimum": 1.5}, "no whole number"),
        ({"type": "object", "properties": {"a": False}}, "the schema 'false'"),
        ({"type": "array", "items": [INTEGER]}, "a list of 'items'"),
        ({"anyOf": [False, INTEGER]}, "the schema 'false'"),
    ],
)
def test_schemas_that_xgrammar_cannot_read_are_refused(schema, what):
    with pytest.raises(ParameterError, match=what):
        check_enforceable([taking(schema)], "tool_choice")


def test_parameters_are_an_object():
    with pytest.raises(ParameterError, match="'object'"):
        check_enforceable([tool("f", STRING)], "tool_choice")
