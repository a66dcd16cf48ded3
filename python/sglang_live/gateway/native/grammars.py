"""Grammars of clients, bounded before an engine compiles them.

In: ebnf, json_schema, structural_tag. Out: the same, or ParameterError.
"""

import re
from typing import Any

import orjson

from sglang_live.errors import BadInputError
from sglang_live.gateway.native.checks import Check, ParameterError, text
from sglang_live.gateway.native.patterns import MAX_DEPTH, MAX_EXPANDED, regex
from sglang_live.gateway.tool_schema import check_schema, target_of
from sglang_live.models.grammars.call_grammar import MARK

_GRAMMAR_BYTES = 16_384
_NODES = 4_000
# Possessive, so that a grammar of "{" and blanks is matched in linear time.
_REPEAT = re.compile(r"\{\s*+(\d++)?\s*+(,)?\s*+(\d++)?\s*+\}")
_DIGITS = 9  # a longer number exceeds every bound, and int() takes at most 4,300 digits
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_COUNT = 1_024
_SCHEMA_KEYS = ("json_schema", "schema")  # in a structural tag
# xgrammar writes "at least m of these n" as one rule for each pair of a property and a number.
_MAX_PROPERTY_RULES = 4_096


def ebnf(value: Any, at: str) -> str:
    grammar = text(_GRAMMAR_BYTES, least=1)(value, at)
    if grammar.startswith(MARK):
        raise ParameterError(at, "begins with a line that this server writes itself.")
    depth = most = 0
    for char in grammar:
        depth += (char in "([{") - (char in ")]}")
        most = max(most, depth)
    written_out = len(grammar)
    for low, _, high in _REPEAT.findall(grammar):
        written_out *= max(1, int(low[:_DIGITS] or 0), int(high[:_DIGITS] or 0))
        if written_out > 50 * MAX_EXPANDED:
            break
    if most > MAX_DEPTH or written_out > 50 * MAX_EXPANDED:
        raise ParameterError(at, "is nested too deep, or too large once its repeats are written.")
    return grammar


def json_schema(value: Any, at: str) -> str:
    """Check a JSON schema as SGLang takes it: a text of JSON."""
    written = text(_GRAMMAR_BYTES * 4)(value, at)
    if written in ("", "$$ANY$$"):
        return written
    schema(_loads(written, at), at)
    return written


def schema(value: Any, at: str) -> dict[str, Any]:
    """Check an object that is a JSON schema: depth, size and counts."""
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
    """Check every part of a schema or tag: depth, number of parts, counts, and patterns."""
    pending: list[tuple[Any, int, str]] = [(root, 0, "")]
    n_parts = n_rules = 0
    special: dict[str, Check] = {"pattern": regex, "regex": regex, "grammar": ebnf}
    while pending:
        part, depth, key = pending.pop()
        n_parts += 1
        if depth > MAX_DEPTH or n_parts > _NODES:
            raise ParameterError(at, f"is nested deeper than {MAX_DEPTH}, or has too many parts.")
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
