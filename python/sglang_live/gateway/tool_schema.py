"""The JSON schemas by which clients describe parameters, and arguments held against them.

In: a schema as a client wrote it, arguments as the model did. Out: where either is wrong.
A schema is a program of somebody else, run beside everybody's calls: it refers to itself only, its
patterns are not matched, and what takes too many steps is given up. Keywords are those of draft
2020-12; of older drafts, what has another form there is not looked at.
"""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import orjson
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import create

from sglang_live.errors import BadInputError

# A few microseconds each. A hundred objects of fifteen properties, more than a reply can hold,
# take a quarter of it.
_MAX_STEPS = 50_000
_BYTES_PER_STEP = 8  # of values that are compared whole
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
# They name a schema, or another draft. References are pointers here, so a name means nothing.
_NAMES = ("$schema", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
_POINTERS = ("$ref", "$dynamicRef", "$recursiveRef")
_OLD_FORMS = {"items": list, "exclusiveMinimum": bool, "exclusiveMaximum": bool}
# Matching a pattern can take for ever, and what is "unevaluated" is found by doing all again.
_NOT_LOOKED_AT = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties")

Keyword = Callable[[Validator, Any, Any, dict[str, Any]], Any]


class SchemaFaultError(BadInputError):
    """It is no schema that arguments could be held against."""


class TooManyStepsError(Exception):
    """To hold these arguments against this schema takes too long."""


def check_schema(schema: Any) -> None:
    """Raises SchemaFaultError: it says where."""
    _cleaned(schema)


def fault_in(arguments: dict[str, Any], schema: dict[str, Any]) -> str | None:
    """Where the arguments do not fit, and what: it quotes neither. None: they fit.

    Raises:
        SchemaFaultError: see check_schema.
        TooManyStepsError: nobody knows.
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
    """All that is looked at, out of one budget."""
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
                n_steps += len(fault.message) // _BYTES_PER_STEP  # it quotes all of the instance
                yield fault

        return check_in_time

    def reference(validator, pointer, instance, _schema):
        return validator.descend(instance, target_of(root, pointer))

    ours = {name: reference for name in _POINTERS}
    ours |= {"uniqueItems": _unique_items, "additionalProperties": _additional_properties}
    known = {k: v for k, v in Draft202012Validator.VALIDATORS.items() if k not in _NOT_LOOKED_AT}
    return {name: counted(name, check) for name, check in {**known, **ours}.items()}


def _cost(name: str, value: Any) -> int:
    if name in ("enum", "const"):
        return 1 + len(orjson.dumps(value)) // _BYTES_PER_STEP
    return 1 + len(value) if isinstance(value, list | dict) else 1


def _unique_items(validator: Validator, wanted: bool, instance: Any, _schema):
    # The library compares each with each where they cannot be sorted.
    if wanted and isinstance(instance, list):
        seen = {orjson.dumps(item, option=orjson.OPT_SORT_KEYS) for item in instance}
        if len(seen) < len(instance):
            yield ValidationError("not unique")


def _additional_properties(validator: Validator, value: Any, instance: Any, schema):
    # Where patterns name properties, nobody can tell which are additional without matching them.
    if "patternProperties" not in schema:
        check = Draft202012Validator.VALIDATORS["additionalProperties"]
        yield from check(validator, value, instance, schema)


# --- the form of a schema ---


def _cleaned(schema: Any) -> dict[str, Any]:
    """A copy without names. Whatever a reference leads to has the form of a schema as well."""
    if not isinstance(schema, dict):
        raise SchemaFaultError("Not a JSON schema: no object.")
    try:
        root = orjson.loads(orjson.dumps(schema))
    except orjson.JSONEncodeError as error:  # nested too deep, or a number beyond 64 bits
        raise SchemaFaultError(f"Not a JSON schema: {error}.") from None
    pending: list[tuple[str, Any]] = [("#", root)]
    seen: dict[int, dict[str, Any]] = {}
    while pending:
        at, part = pending.pop()
        if isinstance(part, bool) or id(part) in seen:
            continue
        if not isinstance(part, dict):
            raise SchemaFaultError(f"Not a JSON schema: {at} is none.")
        seen[id(part)] = part
        for keyword, value in part.items():
            pending += _schemas_in(root, keyword, value, f"{at}/{keyword}")
    for part in seen.values():
        for name in _NAMES:
            part.pop(name, None)
    return root


def _schemas_in(root: dict, keyword: str, value: Any, at: str) -> list[tuple[str, Any]]:
    """The schemas of one keyword and their places; none of one that is not known."""
    if keyword in _POINTERS:
        return [(value, target_of(root, value))]
    form = _FORMS.get(keyword)
    if form is None or isinstance(value, _OLD_FORMS.get(keyword, ())):
        return []
    fits, inner = form
    if not fits(value):
        raise SchemaFaultError(f"Not a JSON schema: {at} has not the form of one.")
    return [(f"{at}{name}", part) for name, part in inner(value)]


def target_of(root: dict[str, Any], pointer: Any) -> Any:
    """What a reference leads to (RFC 6901, in a URI fragment)."""
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
