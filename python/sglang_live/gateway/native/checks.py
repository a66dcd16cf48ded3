"""Checks of JSON values, composed per field.

In: a value of a client, and its place in the body. Out: the value to send on, or ParameterError,
which names the place. A null counts as an absent field.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.gateway.json_forms import check_neutral, missing_parameter, unknown_parameter

Check = Callable[[Any, str], Any]
_SHOWN_CHARS = 64


class ParameterError(BadInputError):
    """
    param: the place in the body, such as `sampling_params.n`.
    is_kind: whether the value has the right type.
    """

    def __init__(self, param: str, message: str, *, is_kind: bool = True):
        if not is_kind:
            self.code = "invalid_type"
        self.param = param[:_SHOWN_CHARS]
        super().__init__(f"{self.param}: {message}")


def boolean(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(at, "must be true or false.", is_kind=False)
    return value


def integer(low: int, high: int) -> Callable[[Any, str], int]:
    def check(value: Any, at: str) -> int:
        if type(value) is not int or not low <= value <= high:
            message = f"must be a whole number from {low} to {high}."
            raise ParameterError(at, message, is_kind=type(value) is int)
        return value

    return check


def number(low: float, high: float) -> Callable[[Any, str], float]:
    def check(value: Any, at: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            message = f"must be a number from {low:g} to {high:g}."
            raise ParameterError(at, message, is_kind=is_number)
        found: float = value
        return found

    return check


def text(max_chars: int, *, least: int = 0) -> Callable[[Any, str], str]:
    def check(value: Any, at: str) -> str:
        if not isinstance(value, str) or not least <= len(value) <= max_chars:
            message = f"must be a text of {least} to {max_chars} characters."
            raise ParameterError(at, message, is_kind=isinstance(value, str))
        return value

    return check


def one_of(*values: Any) -> Check:
    def check(value: Any, at: str) -> Any:
        if not any(type(value) is type(known) and value == known for known in values):
            is_kind = any(type(value) is type(known) for known in values)
            raise ParameterError(at, f"must be one of {list(values)}.", is_kind=is_kind)
        return value

    return check


def without_effect(*neutral: Any) -> Check:
    def check(value: Any, at: str) -> Any:
        check_neutral(value, neutral, at)
        return value

    return check


def list_of(item: Check, *, most: int, least: int = 0) -> Callable[[Any, str], list[Any]]:
    def check(value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            message = f"must be a list of {least} to {most}."
            raise ParameterError(at, message, is_kind=isinstance(value, list))
        return [item(part, f"{at}[{n}]") for n, part in enumerate(value)]

    return check


def one_or_list(item: Check, *, most: int) -> Check:
    several = list_of(item, most=most)
    return lambda value, at: several(value, at) if isinstance(value, list) else item(value, at)


def fields(
    table: Mapping[str, Check],
    *,
    required: tuple[str, ...] = (),
    dropped: tuple[str, ...] = (),
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
    nulls: bool = False,
) -> Callable[[Any, str], dict[str, Any]]:
    """Check of an object with these fields and no others.

    Args:
        dropped: fields that are accepted and not sent on.
        neutral: fields that are not sent on, and have these values only.
        nulls: whether fields that are not listed may be null.
    """
    neutral = neutral or {}

    def check(value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ParameterError(at or "body", "must be an object.", is_kind=False)
        kept = {}
        for name, part in value.items():
            place = f"{at}.{name}" if at else name
            if name not in table and name not in dropped and name not in neutral:
                if part is None and nulls:
                    continue
                raise unknown_parameter(place)
            if name in neutral:
                check_neutral(part, neutral[name], place)
            elif name in table and part is not None:
                kept[name] = table[name](part, place)
        for name in required:
            if name not in kept:
                raise missing_parameter(f"{at}.{name}" if at else name)
        return kept

    return check
