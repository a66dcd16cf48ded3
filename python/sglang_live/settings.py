"""Settings: frozen dataclasses whose fields say in their types what they accept.

@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Settings):
    max_sessions: Count = 64
    drain_s: NonNegative = 20.0
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Self, get_args, get_type_hints

from sglang_live.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Check:
    """what: completes "must be", for the message."""

    what: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Positive = Annotated[float, Check("positive", lambda v: _is_number(v) and 0 < v < math.inf)]
NonNegative = Annotated[float, Check("at least 0", lambda v: _is_number(v) and 0 <= v < math.inf)]
Share = Annotated[float, Check("from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1)]
Count = Annotated[int, Check("a whole number, at least 1", lambda v: _is_whole(v) and v >= 1)]
Whole = Annotated[int, Check("a whole number, at least 0", lambda v: _is_whole(v) and v >= 0)]
Switch = Annotated[bool, Check("true or false", lambda v: isinstance(v, bool))]


class Settings:
    """Base of dataclasses that check their fields when they are made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raises BadInputError. What depends on several fields is for `check`."""
        for name, check in _checks_of(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not None and not check.holds(value):
                raise BadInputError(f"{name} must be {check.what}, got {value}")
        self.check()

    def check(self) -> None:
        """Raises BadInputError."""

    def not_above(self, low: str, high: str) -> None:
        """Raises BadInputError. The names may be of settings within settings."""
        if attrgetter(low)(self) > attrgetter(high)(self):
            raise BadInputError(f"{low} must not be above {high}")

    def changed(self, values: Mapping[str, object]) -> Self:
        """A copy with other values: by name, or by `part.name` for settings within settings.

        Raises BadInputError for names that there are not.
        """
        names = {field.name for field in fields(self)}  # type: ignore[arg-type]
        own: dict[str, Any] = {}
        parts: dict[str, dict[str, object]] = {}
        for name, value in values.items():
            first, dot, rest = name.partition(".")
            if first not in names or (dot and not is_dataclass(getattr(self, first))):
                raise BadInputError(f"there is no setting {name}")
            if dot:
                parts.setdefault(first, {})[rest] = value
            else:
                own[first] = value
        for first, inner in parts.items():
            own[first] = own.get(first, getattr(self, first)).changed(inner)
        return replace(self, **own)  # type: ignore[type-var]


@cache
def _checks_of(kind: type) -> dict[str, Check]:
    """By field; of an optional field for its values other than None."""
    found: dict[str, Check] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for one in (hint, *get_args(hint)):
            checks = [extra for extra in getattr(one, "__metadata__", ()) if type(extra) is Check]
            if checks:
                [found[name]] = checks
    return found
