"""The grammar of a function call that a response has to make.

Behind the forced opening (tool_prompt.opening_of) the grammar allows one call of one function whose
arguments fit its parameters, and then the response's end. gateway/forced_call.py refuses schemas of
which the grammar would leave something out.
"""

import json
from functools import lru_cache
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.grammars.grammar_rules import (
    ROOT,
    Repeat,
    Rule,
    Rules,
    Sequence,
    Text,
    written,
)
from sglang_live.models.grammars.schema_rules import schema_rules
from sglang_live.models.tool_prompt import CALL_END

_REFERENCES = ("$ref", "anyOf", "oneOf", "allOf")
_MEMBERS = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
_END = Text(f"}}\n{CALL_END}")
# Of a response that has to be a call, where its client gives no limit.
MAX_CALL_TOKENS = 512
# The grammar's first line: it is closed in time where it has one (bridge/grammars/call_end.py).
MARK = "# A function call.\n"


@lru_cache(maxsize=64)
def call_grammar(functions: tuple[str, ...], must_call: str) -> str:
    """
    Args:
        functions: JSON text of each, as in OpenAI's chat API.
        must_call: the name of one of them; "": any.
    Returns:
        EBNF of what follows the opening. Without free white space: a small model could write
        nothing else.
    Raises:
        BadInputError: it cannot be made.
    """
    tools = [json.loads(text) for text in functions]
    rules, sides = Rules(), []
    for n, tool in enumerate(tools):
        if must_call in ("", tool["name"]):
            own = f"call_{n}_"
            rules |= arguments_rules(tool["name"], tool.get("parameters") or {}, own)
            name = () if must_call else (Text(f'"{tool["name"]}", "arguments": '),)
            sides.append((*name, Rule(own + ROOT)))
    rules |= {"any": sides, ROOT: [(Rule("any"), _END)]}
    return MARK + written(rules)


def arguments_rules(name: str, parameters: dict[str, Any], prefix: str) -> Rules:
    """
    Args:
        prefix: of the names of all rules.
    Raises:
        BadInputError: they cannot be made.
    """
    schema = dict(parameters)
    if not any(keyword in schema for keyword in _REFERENCES):
        schema["type"] = "object"
        if not any(keyword in schema for keyword in _MEMBERS):
            schema["additionalProperties"] = False  # a function without parameters
    try:
        rules = schema_rules(schema)
    except (RuntimeError, ValueError, RecursionError) as error:
        raise BadInputError(f"no grammar can be made of {name}: {error}") from error
    return {
        prefix + key: [_renamed(side, prefix) for side in sides] for key, sides in rules.items()
    }


def _renamed(side: Sequence, prefix: str) -> Sequence:
    return tuple(
        Rule(prefix + one.name)
        if isinstance(one, Rule)
        else Repeat(prefix + one.name, one.least, one.most)
        if isinstance(one, Repeat)
        else one
        for one in side
    )
