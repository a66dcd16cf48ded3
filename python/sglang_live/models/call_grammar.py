"""The grammar of a function call that a response has to make.

Behind the forced opening (tool_prompt.opening_of) the grammar allows one call of one function whose
arguments fit its parameters, and then the response's end. gateway/forced_call.py refuses schemas of
which xgrammar would leave something out.
"""

import json
from functools import lru_cache
from typing import Any

from xgrammar import Grammar

from sglang_live.errors import BadInputError
from sglang_live.models.tool_prompt import CALL_END

_REFERENCES = ("$ref", "anyOf", "oneOf", "allOf")
_MEMBERS = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")


@lru_cache(maxsize=64)
def call_grammar(functions: tuple[str, ...], must_call: str) -> str:
    """
    Args:
        functions: JSON text of each function, as in OpenAI's chat API.
        must_call: the name of one of them; "": any.
    Returns:
        EBNF of what follows the opening. Without free white space: a small model could write
        nothing else.
    Raises:
        BadInputError: xgrammar cannot make it.
    """
    tools = [json.loads(text) for text in functions]
    try:
        if must_call:
            [arguments] = [_arguments(tool) for tool in tools if tool["name"] == must_call]
            return str(Grammar.concat(arguments, _end()))
        calls = [
            Grammar.concat(_literal(f'"{tool["name"]}", "arguments": '), _arguments(tool))
            for tool in tools
        ]
        return str(Grammar.concat(Grammar.union(*calls), _end()))
    except RuntimeError as error:
        raise BadInputError(f"no grammar can be made of these functions: {error}") from error


def _arguments(tool: dict[str, Any]) -> Grammar:
    schema = dict(tool.get("parameters") or {})
    if not any(name in schema for name in _REFERENCES):
        schema["type"] = "object"
        if not any(name in schema for name in _MEMBERS):
            schema["additionalProperties"] = False  # a function without parameters
    return Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)


def _end() -> Grammar:
    return _literal(f"}}\n{CALL_END}")


def _literal(text: str) -> Grammar:
    return Grammar.from_ebnf(f"root ::= {json.dumps(text)}")
