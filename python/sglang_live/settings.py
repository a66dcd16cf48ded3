"""Settings: frozen dataclasses whose fields say in their types what they accept.

@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Settings):
    max_sessions: Count = flag(64, "sessions at once")
    sample_s: NonNegative = 2.0

`flag` makes a field a flag as well, here `--max-sessions N`. What it accepts, its default and its
help stand in the field alone: argparse, messages about wrong values and the tables of
docs/configuration.md read them there.
"""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from sglang_live.errors import BadInputError

T = TypeVar("T")
# What a flag's value is, by the end of the flag's name.
_VALUES = {"-s": "S", "-ms": "MS", "-gib": "GIB", "-dir": "DIR", "file": "FILE"}


@dataclass(frozen=True, slots=True)
class Check:
    """what: completes "must be", for the message."""

    what: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_NUMBER = Check("a number", _is_number)
_WHOLE = Check("a whole number", _is_whole)
Positive = Annotated[float, _NUMBER, Check("positive", lambda v: 0 < v < math.inf)]
NonNegative = Annotated[float, _NUMBER, Check("at least 0", lambda v: 0 <= v < math.inf)]
Seconds = Annotated[float, _NUMBER, Check("seconds, at least 0", lambda v: 0 <= v < math.inf)]
Share = Annotated[float, _NUMBER, Check("from 0 to 1", lambda v: 0 <= v <= 1)]
Count = Annotated[int, _WHOLE, Check("at least 1", lambda v: v >= 1)]
Whole = Annotated[int, _WHOLE, Check("at least 0", lambda v: v >= 0)]
Switch = Annotated[bool, Check("true or false", lambda v: isinstance(v, bool))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """
    field, kind, default: of the dataclass's field; the kind is its type without None.
    name: without the hyphens before it.
    help: without the default, which follows.
    value: what follows the flag; "": as its name and kind say.
    unset: what the default means, where it does not say that itself.
    env: variable that is read if the flag is absent: text, or texts with commas between them.
    group: title in the server's --help, if it is not that of the part.
    read: makes the value of the text, if the kind does not.
    """

    field: str
    kind: Any
    default: Any
    name: str
    help: str
    value: str = ""
    unset: str = ""
    env: str = ""
    group: str = ""
    read: Callable[[str], Any] | None = None

    @property
    def choices(self) -> tuple[str, ...]:
        given = get_args(self.kind) if get_origin(self.kind) is Literal else ()
        return tuple(choice for choice in given if choice)

    @property
    def shown_default(self) -> str:
        if self.unset or self.kind is bool or self.default in (None, "", (), MISSING):
            return self.unset
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def shown_value(self) -> str:
        """ "": a switch has none."""
        if self.kind is bool or self.choices:
            return "|".join(self.choices)
        ending = (value for end, value in _VALUES.items() if self.name.endswith(end))
        usual = "N" if self.kind in (int, float) else self.name.upper()
        return self.value or next(ending, usual)

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        notes = [f"env {self.env}"] if self.env else []
        notes += [f"default: {self.shown_default}"] if self.shown_default else []
        text = f"{self.help} ({'; '.join(notes)})" if notes else self.help
        how: dict[str, Any] = {"default": self.default, "help": text.replace("%", "%%")}
        if self.kind is bool:
            how["action"] = "store_true"
        else:
            how["type"] = self.read or (self.kind if self.kind in (int, float) else str)
            how |= {"choices": self.choices} if self.choices else {"metavar": self.shown_value}
        if self.default is MISSING:
            how |= {"required": True, "default": None}
        elif self.default == ():
            how |= {"action": "append", "default": None}
        parser.add_argument(f"--{self.name}", **how)

    def value_in(self, own: argparse.Namespace) -> Any:
        """None: it is not given."""
        given = getattr(own, self.name.replace("-", "_"), None)
        if self.env and not given:
            given = os.environ.get(self.env)
            if given and self.default == ():
                given = [word.strip() for word in given.split(",") if word.strip()]
        if given is not None and self.default == ():
            return tuple(given)
        if self.kind is Path and not self.read:
            return Path(given) if given else None
        return given


def flag(default: Any, help: str, *, factory: Any = MISSING, **about: Any) -> Any:
    """A field of Settings that is a flag.

    Args:
        default: MISSING: the flag is required, or `factory` makes its default.
        about: see Flag.
    """
    about["help"] = help
    if factory is not MISSING:
        return field(default_factory=factory, metadata={"flag": about | {"default": None}})
    return field(default=default, metadata={"flag": about | {"default": default}})


def part(group: str) -> Any:
    """A field whose type is Settings with flags. group: their title in the server's --help."""
    return field(metadata={"group": group})


def flags_of(kind: type) -> list[Flag]:
    """Those of its fields and of its parts, in their order."""
    found: list[Flag] = []
    for _, group, of_field in _flag_fields(kind):
        if isinstance(of_field, Flag):
            found.append(of_field)
        else:
            found += [replace(one, group=one.group or group) for one in flags_of(of_field)]
    return found


def add_flags(parser: argparse._ActionsContainer, kind: type, *names: str) -> None:
    """names: of the fields that are meant; none: all."""
    for one in flags_of(kind):
        if not names or one.field in names:
            one.add_to(parser)


def read_flags(own: argparse.Namespace, kind: type[T], **given: Any) -> T:
    """Settings from flags that add_flags added; the others keep their defaults.

    Args:
        given: fields that are no flags, or whose values are known.
    Raises:
        BadInputError: for values that the settings do not accept.
    """
    for name, _, of_field in _flag_fields(kind):
        if name in given:
            continue
        if not isinstance(of_field, Flag):
            given[name] = read_flags(own, of_field)
        elif (value := of_field.value_in(own)) is not None:
            given[name] = value
    return kind(**given)


def _flag_fields(kind: type) -> tuple[tuple[str, str, Flag | type], ...]:
    """Name and group of each field that is a flag or a part, and the flag or the part's type."""
    found: list[tuple[str, str, Flag | type]] = []
    hints = get_type_hints(kind)
    for one in fields(kind):
        hint, about = hints[one.name], one.metadata
        if "flag" in about:
            if NoneType in get_args(hint):
                [hint] = (arg for arg in get_args(hint) if arg is not NoneType)
            named = {"name": one.name.replace("_", "-")} | about["flag"]
            found.append((one.name, "", Flag(field=one.name, kind=hint, **named)))
        elif "group" in about:
            found.append((one.name, about["group"], hint))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Base of dataclasses that check their fields when they are made."""

    def __post_init__(self) -> None:
        """Raises BadInputError. What depends on several fields is for `check`."""
        for name, (label, checks) in _checks_of(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            for check in checks if value is not None else ():
                if not check.holds(value):
                    raise BadInputError(f"{label} must be {check.what}, got {value}")
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
        names = {field.name for field in fields(self)}
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
        return replace(self, **own)


@cache
def _checks_of(kind: type) -> dict[str, tuple[str, list[Check]]]:
    """By field, with the name for messages; of an optional field for its values other than None."""
    labels = {one.field: one.name for _, _, one in _flag_fields(kind) if isinstance(one, Flag)}
    found: dict[str, tuple[str, list[Check]]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for one in (hint, *get_args(hint)):
            checks = [extra for extra in getattr(one, "__metadata__", ()) if type(extra) is Check]
            if checks:
                found[name] = labels.get(name, name), checks
    return found
