"""Regular expressions of clients, bounded before an engine compiles or runs them.

In: stop_regex, regex. Out: the same, or ParameterError.
Python's backtracking matcher searches a stop_regex in the scheduler's loop, after every token. A
regex is compiled to an automaton whose size depends on its repeats.
"""

import re
import re._constants as sre  # type: ignore[import-not-found] # private: typeshed omits it
import re._parser as sre_parser  # type: ignore[import-not-found] # private: typeshed omits it
from typing import Any

from sglang_live.gateway.native.checks import ParameterError, text

_STOP_CHARS = 256
_STOP_STEPS = 10_000
_REGEX_CHARS = 4_096
MAX_EXPANDED = 20_000
MAX_DEPTH = 24


def stop_regex(value: Any, at: str) -> str:
    """Refuse an expression that may take more than _STOP_STEPS steps from one place in a text."""
    pattern = text(_STOP_CHARS, least=1)(value, at)
    steps, width = _ways(_parse(pattern, at), at)
    if steps * max(1, width) > _STOP_STEPS:
        raise ParameterError(at, "may take too many steps: fewer or shorter repeats.")
    return pattern


def regex(value: Any, at: str) -> str:
    pattern = text(_REGEX_CHARS, least=1)(value, at)
    tree = _parse(pattern, at)
    if _size(tree, at, 0) > MAX_EXPANDED:
        raise ParameterError(at, "is too large once its repeats are written out.")
    return pattern


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
    if depth > MAX_DEPTH:
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
