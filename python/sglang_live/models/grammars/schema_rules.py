"""Rules of JSON that fits a schema.

xgrammar makes them. Here patterns become rules, and what JSON cannot hold is left out: bare control
characters, halves of surrogate pairs, and exponents beyond a double. Repeats stay without a bound
where the schema sets none: xgrammar takes 10 ms of each token for a bound of 1,000, and nothing
without one. shortest_end.py knows when they are long enough.
"""

import json
from itertools import count
from typing import Any

from sglang_live.models.grammars.grammar_rules import (
    Characters,
    Element,
    Repeat,
    Rule,
    Rules,
    Sequence,
    Text,
    rules_of,
)
from sglang_live.models.grammars.pattern_rules import pattern_rules

_MOST_EXPONENT_DIGITS = 2
_PLAIN = Characters(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)))
_EXPONENT = Characters(((101, 101), (69, 69)))
_CHARACTER = Rule("json_character")
_OWN: Rules = {
    _CHARACTER.name: [
        (_PLAIN,),  # not "all but", where xgrammar takes bytes that are no character
        (Text("\\"), Characters(tuple((ord(char), ord(char)) for char in '"\\nt'))),
    ],
    # Behind the opening quote. Without \uXXXX, which could write declared names in disguise.
    "basic_string_sub": [(Repeat(_CHARACTER.name, 0, None), Text('"'))],
    "basic_escape": [(Characters(tuple((ord(char), ord(char)) for char in '"\\nt')),)],
}
# xgrammar's character of a string with a length.
_BARE = Characters(((34, 34), (92, 92), (13, 13), (10, 10)), negated=True)
# Keywords whose value holds no schema, and those whose value holds one for each name.
_VALUES = ("enum", "const", "default", "examples")
_TABLES = ("properties", "$defs", "definitions", "dependentSchemas")
_FIRST_MARK = 0xE000


def schema_rules(schema: dict[str, Any]) -> Rules:
    """
    Raises:
        RuntimeError: xgrammar cannot make rules of the schema.
        ValueError: a pattern, or xgrammar's rules, cannot be read.
    """
    # It imports torch and transformers: seconds, which only those pay who force a call.
    from xgrammar import Grammar

    written = json.dumps(schema, ensure_ascii=False)
    marks = (chr(code) for code in count(_FIRST_MARK) if chr(code) not in written)
    patterns: dict[str, str] = {}
    marked = _marked(schema, marks, patterns)
    grammar = Grammar.from_json_schema(json.dumps(marked), any_whitespace=False)
    rules = rules_of(grammar) | _OWN
    for n, (mark, pattern) in enumerate(patterns.items()):
        entry = f"pattern_{n}"
        rules |= pattern_rules(pattern, entry)
        _replace(rules, Text(mark), Rule(entry))
    _replace(rules, _BARE, _PLAIN)
    for name, sides in list(rules.items()):
        rules[name] = _without_tail_call(name, [_in_range(side) for side in sides], rules)
    return rules


def _marked(part: Any, marks: Any, patterns: dict[str, str]) -> Any:
    """The schema with a character of its own in place of each pattern."""

    def mark(pattern: Any) -> Any:
        if not isinstance(pattern, str):
            return pattern
        found = next(marks)
        patterns[found] = pattern
        return found

    if isinstance(part, list):
        return [_marked(one, marks, patterns) for one in part]
    if not isinstance(part, dict):
        return part
    out: dict[str, Any] = {}
    for name, value in part.items():
        if name in _VALUES:
            out[name] = value
        elif name in _TABLES and isinstance(value, dict):
            out[name] = {key: _marked(one, marks, patterns) for key, one in value.items()}
        elif name == "patternProperties" and isinstance(value, dict):
            out[name] = {mark(key): _marked(one, marks, patterns) for key, one in value.items()}
        else:
            out[name] = mark(value) if name == "pattern" else _marked(value, marks, patterns)
    return out


def _replace(rules: Rules, old: Element, new: Element) -> None:
    for name, sides in rules.items():
        rules[name] = [tuple(new if one == old else one for one in side) for side in sides]


def _in_range(side: Sequence) -> Sequence:
    """An exponent, and else what there is."""
    if not side or side[0] != _EXPONENT:
        return side
    *begin, digits = side
    assert isinstance(digits, Repeat)
    return (*begin, Repeat(digits.name, digits.least, _MOST_EXPONENT_DIGITS))


def _without_tail_call(name: str, sides: list[Sequence], rules: Rules) -> list[Sequence]:
    """Make `x ::= y x | y` and `x ::= y x | ""` repeats."""
    for again, last in (sides, sides[::-1]) if len(sides) == 2 else ():
        body = again[:-1]
        if again and again[-1] == Rule(name) and body and last in (body, ()):
            rules[f"{name}_once"] = [body]
            return [(Repeat(f"{name}_once", int(last == body), None),)]
    return sides
