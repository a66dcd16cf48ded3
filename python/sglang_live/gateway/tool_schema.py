"""JSON schemas of functions' parameters, and validation of arguments against them.

In: a client's schema, the model's arguments. Out: the place of a fault in either.
A schema is untrusted code in the process of all sessions: references outside it are refused,
patterns are not matched, and validation stops after a number of steps. Keywords are those of draft
2020-12; a keyword whose form differs in older drafts is ignored in its old form.
"""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import orjson
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import create

from sglang_live.errors import BadInputError

# A few microseconds each. A hundred objects of fifteen properties, more than a response can hold,
# take a quarter of them.
_MAX_STEPS = 50_000
_BYTES_PER_STEP = 8  # for values that are compared as a whole
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
# Keywords that name a schema or its draft. References are JSON pointers here, so names have no
# effect.
_NAMES = ("$schema", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
_POINTERS = ("$ref", "$dynamicRef", "$recursiveRef")
_OLD_FORMS = {"items": list, "exclusiveMinimum": bool, "exclusiveMaximum": bool}
# Matching a pattern can take exponential time; "unevaluated" keywords need a second validation.
_IGNORED = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties")

# All keywords of the draft that restrict what fits.
KEYWORDS = frozenset(Draft202012Validator.VALIDATORS)

Keyword = Callable[[Validator, Any, Any, dict[str, Any]], Any]


class SchemaFaultError(BadInputError):
    """The schema has a fault, so no arguments can be validated against it."""


class TooManyStepsError(Exception):
    """Validation of these arguments against this schema takes too long."""


def check_schema(schema: Any) -> None:
    """Raises SchemaFaultError with the place of the fault."""
    _cleaned(schema)


def fault_in(arguments: dict[str, Any], schema: dict[str, Any]) -> str | None:
    """Validate arguments against a schema.

    Returns:
        Place and keyword of the first fault, without quoting the arguments; None if they fit.
    Raises:
        SchemaFaultError: see check_schema.
        TooManyStepsError: validation takes too long.
    """
    schema = _cleaned(schema)
    validator = create(
        meta_schema={},
        validators=_keywords(schema),
        type_checker=Draft202012Validator.TYPE_CHECKER,
    )(schema)
    try:
        fault = next(validator.iter_errors(arguments), None)
    except RecursionError:
        raise TooManyStepsError from None
    return fault and f"{fault.json_path} does not fit {fault.validator!r}"


def _keywords(root: dict[str, Any]) -> dict[str, Keyword]:
    """The keywords that are validated. All of them share one budget of steps."""
    n_steps = 0

    def counted(name: str, check: Keyword) -> Keyword:
        def check_in_time(
            validator: Validator, value: Any, instance: Any, schema: dict[str, Any]
        ) -> Iterator[ValidationError]:
            nonlocal n_steps
            if isinstance(value, _OLD_FORMS.get(name, ())):
                return
            n_steps += _cost(name, value) + _cost("", instance)
            if n_steps > _MAX_STEPS:
                raise TooManyStepsError
            for fault in check(validator, value, instance, schema) or ():
                n_steps += len(fault.message) // _BYTES_PER_STEP  # quotes the whole instance
                yield fault

        return check_in_time

    def reference(validator: Validator, pointer: Any, instance: Any, _schema: Any) -> Any:
        return validator.descend(instance, target_of(root, pointer))

    ours: dict[str, Keyword] = {name: reference for name in _POINTERS}
    ours |= {"uniqueItems": _unique_items, "additionalProperties": _additional_properties}
    known = {k: v for k, v in Draft202012Validator.VALIDATORS.items() if k not in _IGNORED}
    return {name: counted(name, check) for name, check in {**known, **ours}.items()}


def _cost(name: str, value: Any) -> int:
    if name in ("enum", "const"):
        return 1 + len(orjson.dumps(value)) // _BYTES_PER_STEP
    return 1 + len(value) if isinstance(value, list | dict) else 1


def _unique_items(
    validator: Validator, wanted: bool, instance: Any, _schema: Any
) -> Iterator[ValidationError]:
    # The library compares every pair of items that cannot be sorted.
    if wanted and isinstance(instance, list):
        seen = {orjson.dumps(item, option=orjson.OPT_SORT_KEYS) for item in instance}
        if len(seen) < len(instance):
            yield ValidationError("not unique")


def _additional_properties(
    validator: Validator, value: Any, instance: Any, schema: dict[str, Any]
) -> Iterator[ValidationError]:
    # With patternProperties, additional properties cannot be found without matching the patterns.
    if "patternProperties" not in schema:
        check = Draft202012Validator.VALIDATORS["additionalProperties"]
        yield from check(validator, value, instance, schema)


# --- the form of a schema ---


def parts_of(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | bool]]:
    """The schema, all schemas in it and the targets of its references, with their places.

    Raises:
        SchemaFaultError: one of them is not in the form of a schema.
    """
    pending: list[tuple[str, Any]] = [("#", root)]
    seen: set[int] = set()
    while pending:
        at, part = pending.pop()
        if isinstance(part, bool):
            yield at, part
            continue
        if id(part) in seen:
            continue
        if not isinstance(part, dict):
            raise SchemaFaultError(f"Not a JSON schema: {at} is none.")
        seen.add(id(part))
        for keyword, value in part.items():
            pending += _schemas_in(root, keyword, value, f"{at}/{keyword}")
        yield at, part


def _cleaned(schema: Any) -> dict[str, Any]:
    """A copy without names. Targets of references are checked as schemas too."""
    if not isinstance(schema, dict):
        raise SchemaFaultError("Not a JSON schema: no object.")
    try:
        root: dict[str, Any] = orjson.loads(orjson.dumps(schema))
    except orjson.JSONEncodeError as error:  # nested too deep, or a number beyond 64 bits
        raise SchemaFaultError(f"Not a JSON schema: {error}.") from None
    for _, part in list(parts_of(root)):
        if isinstance(part, dict):
            for name in _NAMES:
                part.pop(name, None)
    return root


def _schemas_in(root: dict[str, Any], keyword: str, value: Any, at: str) -> list[tuple[str, Any]]:
    """The schemas in one keyword's value, with their places; none for unknown keywords."""
    if keyword in _POINTERS:
        return [(value, target_of(root, value))]
    form = _FORMS.get(keyword)
    if form is None or isinstance(value, _OLD_FORMS.get(keyword, ())):
        return []
    fits, inner = form
    if not fits(value):
        raise SchemaFaultError(f"Not a JSON schema: {at} has the wrong form.")
    return [(f"{at}{name}", part) for name, part in inner(value)]


def target_of(root: dict[str, Any], pointer: Any) -> Any:
    """The target of a reference (RFC 6901, in a URI fragment)."""
    if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
        raise SchemaFaultError("A schema may refer to itself only, as in '#/$defs/name'.")
    found: Any = root
    for step in unquote(pointer[2:]).split("/") if pointer != "#" else ():
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(step)] if isinstance(found, list) else found[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise SchemaFaultError(f"Nothing is at {pointer}.") from None
    return found


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return _is_words(names) and _TYPES.issuperset(names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_table_of_words(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_words, value.values()))


_Form = tuple[Callable[[Any], bool], Callable[[Any], list[tuple[str, Any]]]]


def _plain(fits: Callable[[Any], bool]) -> _Form:
    return fits, lambda value: []


_ONE: _Form = (lambda value: True, lambda value: [("", value)])
_SOME: _Form = (
    lambda value: isinstance(value, list) and bool(value),
    lambda value: [(f"/{n}", part) for n, part in enumerate(value)],
)
_NAMED: _Form = (
    lambda value: isinstance(value, dict),
    lambda value: [(f"/{name}", part) for name, part in value.items()],
)
_NUMBER, _COUNT = _plain(_is_number), _plain(_is_count)
_FORMS: dict[str, _Form] = {
    "type": _plain(_is_type),
    "required": _plain(_is_words),
    "enum": _plain(lambda value: isinstance(value, list)),
    "multipleOf": _plain(lambda value: _is_number(value) and value > 0),
    "dependentRequired": _plain(_is_table_of_words),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SOME),
    **dict.fromkeys(("not", "if", "then", "else", "items", "contains"), _ONE),
    **dict.fromkeys(("additionalProperties", "propertyNames"), _ONE),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _ONE),
    **dict.fromkeys(("properties", "patternProperties"), _NAMED),
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas"), _NAMED),
    **dict.fromkeys(("$schema", "pattern"), _plain(lambda value: isinstance(value, str))),
}
