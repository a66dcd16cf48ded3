"""Comparison of SGLang's private and undocumented names, which sglang_live uses, with SGLang.

In: names.py. Out: differences to the installed SGLang, for scripts/check_seams.py.
"""

import ast
import inspect
import pkgutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Upstream:
    """Names of one class or module of SGLang.

    Attributes:
        target: dotted path of the class or module.
        functions: parameters_of() each function or method, by name.
        attributes: other names of the class, its instances or the module, separated by spaces.
        used_in: module or room below sglang_live.
    """

    target: str
    functions: dict[str, str] = field(default_factory=dict)
    attributes: str = ""
    used_in: str = ""


def differences(names: Upstream) -> list[str]:
    """What differs in the installed SGLang; empty if nothing does."""
    try:
        owner = pkgutil.resolve_name(names.target)
    except (ImportError, AttributeError):
        return [f"{names.target} does not exist"]
    found = []
    for name, expected in names.functions.items():
        function = getattr(owner, name, None)
        if not callable(function):
            found.append(f"{names.target}.{name} does not exist")
        elif (actual := parameters_of(function)) != expected:
            found.append(f"{names.target}.{name} takes ({actual}), expected ({expected})")
    known = attributes_of(owner)
    absent = [name for name in names.attributes.split() if name not in known]
    return [*found, *(f"{names.target}.{name} does not exist" for name in absent)]


def parameters_of(function: Callable[..., Any]) -> str:
    """Names of a function's parameters, as `a, b=, *, c=, **d`; `=` marks a default."""
    shown = []
    star = False
    for parameter in inspect.signature(function).parameters.values():
        star |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        prefix = ""
        if parameter.kind is parameter.VAR_POSITIONAL:
            prefix = "*"
        elif parameter.kind is parameter.VAR_KEYWORD:
            prefix = "**"
        default = "" if parameter.default is parameter.empty else "="
        shown.append(f"{prefix}{parameter.name}{default}")
    return ", ".join(shown)


def attributes_of(owner: Any) -> set[str]:
    """Names of a class, those that its methods assign to self included."""
    found = set(dir(owner))
    for cls in getattr(owner, "__mro__", ()):
        found.update(getattr(cls, "__annotations__", {}))
        if cls.__module__ == "builtins":
            continue
        try:
            source = textwrap.dedent(inspect.getsource(cls))
        except (OSError, TypeError):
            continue
        found.update(
            node.attr
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )
    return found
