"""Claims about the rules that stand in for functions of small models."""

import json

import pytest
import xgrammar

from sglang_live.core import HistoryItem, TextPart
from sglang_live.models.demo.location import TRAINED
from sglang_live.models.qwen3_omni.family import FAMILY, Qwen3OmniSpec
from sglang_live.models.stand_ins import call_instead, instead_of_descriptions, words_to_say
from sglang_live.models.tool_prompt import ResponseParts

DELEGATE = json.dumps({"name": "delegate", "parameters": {"type": "object", "properties": {}}})
GIVES_UP = "I did not understand"


def said(role, text="x"):
    return HistoryItem(key="k", role=role, parts=(TextPart(text),))


def function(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return json.dumps({"name": name, "parameters": parameters})


def test_the_first_function_that_takes_any_words_is_called():
    number = function("number", n={"type": "integer"})
    kind = function("kind", of={"type": "string", "enum": ["a"]})
    town = function("weather", town={"type": "string", "description": "of which"})
    called = json.loads(call_instead([number, kind, town, DELEGATE], [said("user")]))
    assert called == {"name": "weather", "arguments": {"town": "unknown"}}
    assert json.loads(call_instead([DELEGATE], [said("user")]))["arguments"] == {}
    assert call_instead([number, kind], [said("user")]) is None


def test_a_model_that_stands_for_one_function_calls_no_other():
    town = function("weather", town={"type": "string"})
    called = json.loads(call_instead([town, DELEGATE], [said("user")], "delegate"))
    assert called == {"name": "delegate", "arguments": {}}
    assert call_instead([town], [said("user")], "delegate") is None
    told, described = instead_of_descriptions("Be brief.", [town, DELEGATE], "delegate")
    assert told.startswith("Be brief. You have no access") and described == [town]
    assert instead_of_descriptions("Be brief.", [town], "delegate") == ("Be brief.", [town])
    assert instead_of_descriptions("Be brief.", [town, DELEGATE], "") == ("Be brief.", [])


@pytest.mark.parametrize(
    "roles", [(), ("user", "tool"), ("system",), ("user", "tool", "assistant")]
)
def test_only_the_users_words_lead_to_a_call(roles):
    assert call_instead([DELEGATE], [said(role) for role in roles]) is None


def test_behind_its_own_words_the_model_still_answers_the_user():
    assert call_instead([DELEGATE], [said("user"), said("assistant")]) is not None


def test_outputs_with_the_last_word_are_said_word_for_word():
    outputs = [said("tool", 'It "rains".'), said("tool", "It\\snows.\n")]
    grammar = words_to_say([said("tool", "old"), said("user"), *outputs])
    assert 'It \\"rains\\". It\\\\snows.' in grammar
    assert xgrammar.Grammar.from_ebnf(grammar) is not None
    assert words_to_say([said("tool"), said("user")]) is None
    assert words_to_say([said("tool", " ")]) is None


@pytest.mark.parametrize("behind", [".", " a word."])
def test_what_gives_up_is_a_call_and_not_spoken(behind):
    parts = ResponseParts(None)
    parts.instead = GIVES_UP, '{"name": "delegate"}'
    words = f"{GIVES_UP}{behind}"
    for n in range(1, len(words) + 1):
        parts.take([1] * n, words[:n])
        assert parts.spoken == "" and parts.n_spoken == 0
        assert parts.has_call == (n >= len(GIVES_UP))
    parts.end([1] * len(words), words)
    assert parts.spoken == "" and parts.calls() == ['{"name": "delegate"}']


def test_what_only_begins_like_it_is_spoken():
    parts = ResponseParts(None)
    parts.instead = GIVES_UP, "{}"
    parts.take([1], "I did")
    assert parts.spoken == ""
    parts.take([1, 2], "I did it.")
    parts.end([1, 2], "I did it.")
    assert (parts.spoken, parts.n_spoken, parts.calls()) == ("I did it.", 2, [])
    cut = ResponseParts(None)
    cut.instead = GIVES_UP, "{}"
    cut.take([1], "I did")
    cut.end([1], "I did")
    assert (cut.spoken, cut.n_spoken) == ("I did", 1)


def test_the_trained_demo_has_the_rules():
    assert Qwen3OmniSpec.load(TRAINED).gives_up == (
        "I did not understand that. Please ask me something else."
    )
    assert not FAMILY.facts(TRAINED).follows_instructions
