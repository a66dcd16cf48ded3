"""Rules in place of what a small model has not learnt: functions.

In: a turn's functions and history. Out: the call that a response stands for; the words that it has
to be. They apply to a checkpoint whose config.json has `gives_up`: how its responses begin to what
it does not understand, or cannot do. There it calls a function, whose description it does not read:
the one that config.json names in `stands_for`, else the first that takes any words. What a function
has put out, it says word for word.
"""

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from sglang_live.core import HistoryItem, TextPart
from sglang_live.models.grammars.grammar_rules import ROOT, Text, written

_ARGUMENT = "unknown"
# With it SmolLM2 apologises for 17 of 24 requests that only an application can do, and for 1 of 24
# others; without, for 11 and 1 (benchmark/notes/parts.md).
_NO_ACCESS = "You have no access to the internet, to the user's data or to devices."
_MOST_SAID = 1_000  # characters
_PLAIN = frozenset(("type", "title", "description", "default"))


def instead_of_descriptions(
    instructions: str, functions: Sequence[str], stands_for: str
) -> tuple[str, list[str]]:
    """Instructions, and the functions that are to be described in them.

    Args:
        functions: JSON text of each, as in OpenAI's chat API.
        stands_for: the one that the rules call; "": any.
    """
    if not stands_for:
        return instructions, []
    left = [text for text in functions if json.loads(text)["name"] != stands_for]
    if len(left) < len(functions):
        instructions = f"{instructions} {_NO_ACCESS}".lstrip()
    return instructions, left


def call_instead(
    functions: Sequence[str], history: Sequence[HistoryItem], stands_for: str = ""
) -> str | None:
    """A call of the first function that takes any words, if what is to be answered is the user's.

    Args:
        functions, stands_for: as above.
    Returns:
        JSON, as between the tags of a call; None: the response stands for itself.
    """
    last = next((item.role for item in reversed(history) if item.role != "assistant"), None)
    if last != "user":
        return None
    for text in functions:
        function = json.loads(text)
        if stands_for and function["name"] != stands_for:
            continue
        parameters = function.get("parameters") or {}
        required, known = parameters.get("required", ()), parameters.get("properties", {})
        if all(_takes_words(known.get(name)) for name in required):
            arguments = dict.fromkeys(required, _ARGUMENT)
            return json.dumps({"name": function["name"], "arguments": arguments})
    return None


def words_to_say(history: Sequence[HistoryItem]) -> str | None:
    """A grammar of functions' outputs, if those have the last word."""
    outputs = list(takewhile(lambda item: item.role == "tool", reversed(history)))
    parts = [part for item in reversed(outputs) for part in item.parts]
    said = " ".join(part.text for part in parts if isinstance(part, TextPart)).strip()
    return written({ROOT: [(Text(said[:_MOST_SAID]),)]}) if said else None


def _takes_words(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string" and schema.keys() <= _PLAIN
