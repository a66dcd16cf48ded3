"""Expressions and grammars of clients, bounded before an engine compiles or runs them.

In: stop_regex, regex, ebnf, json_schema, structural_tag. Out: the same, or ParameterError.
Python's backtracking matcher searches a stop_regex in the scheduler's loop, after every token. A
regex is compiled to an automaton whose size depends on its repeats.
"""

import re
import re._constants as sre  # type: ignore[import-not-found] # private: typeshed omits it
import re._parser as sre_parser  # type: ignore[import-not-found] # private: typeshed omits it
from collections.abc import Callable
from typing import Any

import orjson

from sglang_live.errors import BadInputError
from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.tool_schema import check_schema, target_of
from sglang_live.models.grammars.call_grammar import MARK

_STOP_CHARS = 256
_STOP_STEPS = 10_000
_REGEX_CHARS = 4_096
_MAX_EXPANDED = 20_000
_MAX_DEPTH = 24
_GRAMMAR_BYTES, _SCHEMA_BYTES = 16_384, 65_536
_NODES = 4_000
# Possessive, so that a grammar of "{" and blanks is matched in linear time.
_REPEAT = re.compile(r"\{\s*+(\d++)?\s*+(,)?\s*+(\d++)?\s*+\}")
_DIGITS = 9  # a longer number exceeds every bound, and int() takes at most 4,300 digits
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_COUNT = 1_024
_SCHEMA_KEYS = ("json_schema", "schema")  # in a structural tag
# xgrammar writes "at least m of these n" as one rule for each pair of a property and a number.
_MAX_PROPERTY_RULES = 4_096


# --- expressions ---


def stop_regex(value: str, at: str) -> str:
    """Refuse an expression that may take more than _STOP_STEPS steps from one place in a text."""
    pattern = _sized(value, at, _STOP_CHARS)
    steps, width = _ways(_parse(pattern, at), at)
    if steps * max(1, width) > _STOP_STEPS:
        raise ParameterError(at, "may take too many steps: fewer or shorter repeats.")
    return pattern


def regex(value: str, at: str) -> str:
    pattern = _sized(value, at, _REGEX_CHARS)
    tree = _parse(pattern, at)
    if _size(tree, at, 0) > _MAX_EXPANDED:
        raise ParameterError(at, "is too large once its repeats are written out.")
    return pattern


def _sized(written: str, at: str, most: int) -> str:
    if not 1 <= len(written) <= most:
        raise ParameterError(at, f"must be a text of 1 to {most} characters.")
    return written


def _parse(pattern: str, at: str) -> Any:
    try:
        return sre_parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ParameterError(at, f"is no regular expression: {error}") from None


def _ways(tree: Any, at: str) -> tuple[int, int]:
    """Upper bounds of a matcher's alternatives from one place, and of the characters it passes."""
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
                raise ParameterError(at, "repeats need an upper bound: {0,32} instead of *.")
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
    if depth > _MAX_DEPTH:
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


# --- grammars and schemas ---


def ebnf(value: str, at: str) -> str:
    grammar = _sized(value, at, _GRAMMAR_BYTES)
    if grammar.startswith(MARK):
        raise ParameterError(at, "begins with a line that this server writes itself.")
    depth = most = 0
    for char in grammar:
        depth += (char in "([{") - (char in ")]}")
        most = max(most, depth)
    written_out = len(grammar)
    for low, _, high in _REPEAT.findall(grammar):
        written_out *= max(1, int(low[:_DIGITS] or 0), int(high[:_DIGITS] or 0))
        if written_out > 50 * _MAX_EXPANDED:
            break
    if most > _MAX_DEPTH or written_out > 50 * _MAX_EXPANDED:
        raise ParameterError(at, "is nested too deep, or too large once its repeats are written.")
    return grammar


def json_schema(value: str, at: str) -> str:
    """Check a JSON schema as SGLang takes it: a text of JSON."""
    if value in ("", "$$ANY$$"):
        return value
    schema(_loads(value, at), at)
    return value


def schema(value: Any, at: str) -> dict[str, Any]:
    """Check an object that is a JSON schema: depth, size and counts."""
    if not isinstance(value, dict):
        raise ParameterError(at, "must be a JSON schema.")
    check_bounds(value, at)
    try:
        check_schema(value)
    except BadInputError as error:
        raise ParameterError(at, str(error)) from None
    _check_ends(value, at)
    return value


def structural_tag(value: str, at: str) -> str:
    tag = _loads(value, at)
    if not isinstance(tag, dict):
        raise ParameterError(at, "must be an object.")
    check_bounds(tag, at)
    return value


def _loads(written: str, at: str) -> Any:
    try:
        return orjson.loads(_sized(written, at, _SCHEMA_BYTES))
    except orjson.JSONDecodeError as error:
        raise ParameterError(at, f"is no JSON: {error}") from None


def check_bounds(root: dict[str, Any], at: str) -> None:
    """Check every part of a schema or tag: depth, number of parts, counts, and patterns."""
    pending: list[tuple[Any, int, str]] = [(root, 0, "")]
    n_parts = n_rules = 0
    special: dict[str, Callable[[str, str], str]] = {
        "pattern": regex,
        "regex": regex,
        "grammar": ebnf,
    }
    while pending:
        part, depth, key = pending.pop()
        n_parts += 1
        if depth > _MAX_DEPTH or n_parts > _NODES:
            raise ParameterError(at, f"is nested deeper than {_MAX_DEPTH}, or has too many parts.")
        if key in special and isinstance(part, str):
            special[key](part, f"{at}.{key}")
        if key in _COUNTS and not isinstance(part, dict):
            is_count = isinstance(part, int) and not isinstance(part, bool)
            if not is_count or not 0 <= part <= _MAX_COUNT:
                raise ParameterError(f"{at}.{key}", f"must be from 0 to {_MAX_COUNT}.")
        if isinstance(part, dict):
            n_rules += _property_rules(part)
            if n_rules > _MAX_PROPERTY_RULES:
                raise ParameterError(at, "counts too many properties, with min or maxProperties.")
            if key in _SCHEMA_KEYS:
                _check_ends(part, f"{at}.{key}")
            if isinstance(part.get("patternProperties"), dict):
                for pattern in part["patternProperties"]:
                    regex(pattern, f"{at}.patternProperties")
            pending += [(inner, depth + 1, name) for name, inner in part.items()]
        elif isinstance(part, list):
            pending += [(inner, depth + 1, "") for inner in part]


def _check_ends(root: dict[str, Any], at: str) -> None:
    """Refuse schemas that accept nothing, because a part of them refers to itself alone.

    xgrammar compiles such a schema, and then allows no token at all: its request would be aborted
    in the middle of a batch.
    """
    if _has_endless_part(root):
        raise ParameterError(at, "has a part that refers to itself and to nothing else.")


def _property_rules(part: dict[str, Any]) -> int:
    """Number of rules by which xgrammar counts this part's properties."""
    properties = part.get("properties")
    counts = [part.get(name) for name in ("minProperties", "maxProperties")]
    most = max((n for n in counts if isinstance(n, int)), default=0)
    n_properties = len(properties) if isinstance(properties, dict) else 0
    return n_properties * min(most, n_properties)


def _has_endless_part(root: dict[str, Any]) -> bool:
    """Returns True if a part leads back to itself through references and choices alone.

    A part that writes anything before it reaches itself, as lists and trees do, can end.
    root: a schema whose references were checked.
    """
    parts = _objects_in(root)
    waits_for = {id(part): _must_end(root, part) for part in parts}
    needed_by: dict[int, list[int]] = {}
    for part_id, (_, others) in waits_for.items():
        for other in others:
            needed_by.setdefault(other, []).append(part_id)
    left = {part_id: n for part_id, (n, _) in waits_for.items()}
    ended = [part_id for part_id, n in left.items() if n == 0]
    n_ended = 0
    while ended:
        n_ended += 1
        for part_id in needed_by.get(ended.pop(), ()):
            left[part_id] -= 1
            if left[part_id] == 0:
                ended.append(part_id)
    return n_ended < len(waits_for)


def _objects_in(root: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    pending: list[Any] = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            found.append(part)
        inner = part.values() if isinstance(part, dict) else part
        pending += [one for one in inner if isinstance(one, dict | list)]
    return found


def _must_end(root: dict[str, Any], part: dict[str, Any]) -> tuple[int, list[int]]:
    """Ids of the parts on which this one depends, and how many of them must be able to end."""
    pointer = part.get("$ref")
    if isinstance(pointer, str):  # xgrammar ignores all fields beside it
        try:
            target = target_of(root, pointer)
        except BadInputError:
            return 0, []  # in a place that is no schema
        return (1, [id(target)]) if isinstance(target, dict) else (0, [])
    for name in ("anyOf", "oneOf", "allOf"):
        branches = part.get(name)
        if not isinstance(branches, list) or not branches:
            continue
        others = [id(branch) for branch in branches if isinstance(branch, dict)]
        if name == "allOf":
            return len(others), others
        return (1, others) if len(others) == len(branches) else (0, [])
    return 0, []


# The checks of the fields that hold a grammar.
CHECKS: dict[str, Callable[[str, str], str]] = {
    "stop_regex": stop_regex,
    "regex": regex,
    "ebnf": ebnf,
    "json_schema": json_schema,
    "structural_tag": structural_tag,
}
