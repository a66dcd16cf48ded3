"""Patterns and grammars that clients write, bounded before an engine compiles or runs them.

In: stop_regex, regex, ebnf, json_schema, structural_tag. Out: the same, or ParameterError.
A stop_regex is searched by Python's backtracking matcher in the scheduler's loop, after every
token; the others are compiled to automata whose size their repeats decide.
"""

import re
import re._constants as sre
import re._parser as sre_parser
from typing import Any

import orjson

from sglang_live.errors import BadInputError
from sglang_live.gateway.native.checks import Check, ParameterError, text
from sglang_live.gateway.native.schema_loops import has_endless_part
from sglang_live.gateway.parameters import check_schema

_STOP_CHARS = 256
_STOP_STEPS = 10_000
_REGEX_CHARS, _GRAMMAR_BYTES = 4_096, 16_384
_EXPANDED = 20_000
_DEPTH, _NODES = 24, 4_000
# Possessive: a grammar of "{" and blanks must not be split among the parts in all ways.
_REPEAT = re.compile(r"\{\s*+(\d++)?\s*+(,)?\s*+(\d++)?\s*+\}")
_DIGITS = 9  # more of them are beyond every bound, and int() takes no more than 4,300
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_COUNT = 1_024
_SCHEMA_KEYS = ("json_schema", "schema")  # in a structural tag
# For "at least m of these n" xgrammar has a rule for each pair of a property and a number.
_MAX_PROPERTY_RULES = 4_096


def stop_regex(value: Any, at: str) -> str:
    """Refuses what can take more than _STOP_STEPS steps from one place in the text."""
    pattern = text(_STOP_CHARS, least=1)(value, at)
    steps, width = _ways(_parse(pattern, at), at)
    if steps * max(1, width) > _STOP_STEPS:
        raise ParameterError(at, "may take too many steps: fewer or shorter repeats.")
    return pattern


def regex(value: Any, at: str) -> str:
    pattern = text(_REGEX_CHARS, least=1)(value, at)
    tree = _parse(pattern, at)
    if _size(tree, at, 0) > _EXPANDED:
        raise ParameterError(at, "is too large once its repeats are written out.")
    return pattern


def ebnf(value: Any, at: str) -> str:
    grammar = text(_GRAMMAR_BYTES, least=1)(value, at)
    depth = most = 0
    for char in grammar:
        depth += (char in "([{") - (char in ")]}")
        most = max(most, depth)
    written_out = len(grammar)
    for low, _, high in _REPEAT.findall(grammar):
        written_out *= max(1, int(low[:_DIGITS] or 0), int(high[:_DIGITS] or 0))
        if written_out > 50 * _EXPANDED:
            break
    if most > _DEPTH or written_out > 50 * _EXPANDED:
        raise ParameterError(at, "is nested too deep, or too large once its repeats are written.")
    return grammar


def json_schema(value: Any, at: str) -> str:
    """As SGLang takes it: a text of JSON."""
    written = text(_GRAMMAR_BYTES * 4)(value, at)
    if written in ("", "$$ANY$$"):
        return written
    schema(_loads(written, at), at)
    return written


def schema(value: Any, at: str) -> dict[str, Any]:
    """An object that is a JSON schema, bounded in depth, size and counts."""
    if not isinstance(value, dict):
        raise ParameterError(at, "must be a JSON schema.")
    _bounded(value, at)
    try:
        check_schema(value)
    except BadInputError as error:
        raise ParameterError(at, str(error)) from None
    _check_ends(value, at)
    return value


def structural_tag(value: Any, at: str) -> str:
    written = text(_GRAMMAR_BYTES * 4, least=2)(value, at)
    tag = _loads(written, at)
    if not isinstance(tag, dict):
        raise ParameterError(at, "must be an object.")
    _bounded(tag, at)
    return written


def tag_object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ParameterError(at, "must be an object.")
    _bounded(value, at)
    return value


def _loads(written: str, at: str) -> Any:
    try:
        return orjson.loads(written)
    except orjson.JSONDecodeError as error:
        raise ParameterError(at, f"is no JSON: {error}") from None


def _bounded(root: dict[str, Any], at: str) -> None:
    """Every part of a schema or tag: depth, number of parts, counts, and patterns in it."""
    pending: list[tuple[Any, int, str]] = [(root, 0, "")]
    n_parts = 0
    special: dict[str, Check] = {"pattern": regex, "regex": regex, "grammar": ebnf}
    while pending:
        part, depth, key = pending.pop()
        n_parts += 1
        if depth > _DEPTH or n_parts > _NODES:
            raise ParameterError(at, f"is nested deeper than {_DEPTH}, or has too many parts.")
        if key in special and isinstance(part, str):
            special[key](part, f"{at}.{key}")
        if key in _COUNTS and not isinstance(part, dict):
            is_count = isinstance(part, int) and not isinstance(part, bool)
            if not is_count or not 0 <= part <= _MAX_COUNT:
                raise ParameterError(f"{at}.{key}", f"must be from 0 to {_MAX_COUNT}.")
        if isinstance(part, dict):
            _check_properties(part, at)
            if key in _SCHEMA_KEYS:
                _check_ends(part, f"{at}.{key}")
            if isinstance(part.get("patternProperties"), dict):
                for pattern in part["patternProperties"]:
                    regex(pattern, f"{at}.patternProperties")
            pending += [(inner, depth + 1, name) for name, inner in part.items()]
        elif isinstance(part, list):
            pending += [(inner, depth + 1, "") for inner in part]


def _check_ends(root: dict[str, Any], at: str) -> None:
    if has_endless_part(root):
        raise ParameterError(at, "has a part that refers to itself and to nothing else.")


def _check_properties(part: dict[str, Any], at: str) -> None:
    properties = part.get("properties")
    counts = [part.get(name) for name in ("minProperties", "maxProperties")]
    most = max((n for n in counts if isinstance(n, int)), default=0)
    n_properties = len(properties) if isinstance(properties, dict) else 0
    if n_properties * min(most, n_properties) > _MAX_PROPERTY_RULES:
        raise ParameterError(at, f"counts its {n_properties} properties: too many for that.")


def _parse(pattern: str, at: str) -> Any:
    try:
        return sre_parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ParameterError(at, f"is no regular expression: {error}") from None


def _ways(tree: Any, at: str) -> tuple[int, int]:
    """How many ways a matcher may go from one place, and over how many characters, at most."""
    ways, width = 1, 0
    for kind, value in tree:
        if kind in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
            width += 1
        elif kind is sre.AT:
            continue
        elif kind is sre.SUBPATTERN:
            inner, more = _ways(value[-1], at)
            ways, width = ways * inner, width + more
        elif kind is sre.BRANCH:
            found = [_ways(branch, at) for branch in value[1]]
            ways *= sum(w for w, _ in found)
            width += max(w for _, w in found)
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, body = value
            if high == sre.MAXREPEAT or high > _STOP_STEPS:
                raise ParameterError(at, "repeats need an end here: {0,32} instead of *.")
            inner, more = _ways(body, at)
            # Beyond the budget the exact number does not matter.
            each = min(inner, _STOP_STEPS) ** min(high, 20) if inner > 1 else 1
            ways, width = ways * each * (high - low + 1), width + high * more
        else:
            raise ParameterError(at, "has a part that is not supported here, such as (?=…) or \\1.")
        if ways > _STOP_STEPS or width > _STOP_STEPS:
            raise ParameterError(at, "may take too many steps: fewer or shorter repeats.")
    return ways, width


def _size(tree: Any, at: str, depth: int) -> int:
    """Characters of the expression with its repeats written out."""
    if depth > _DEPTH:
        raise ParameterError(at, "is nested too deep.")
    total = 0
    for kind, value in tree:
        if kind is sre.SUBPATTERN:
            total += _size(value[-1], at, depth + 1)
        elif kind is sre.BRANCH:
            total += sum(_size(branch, at, depth + 1) for branch in value[1])
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, body = value
            times = max(low, 1) if high == sre.MAXREPEAT else max(high, 1)
            total += times * _size(body, at, depth + 1)
        elif kind in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY, sre.AT):
            total += 1
        else:
            raise ParameterError(at, "has a part that is not supported, such as (?=…) or \\1.")
    return total
