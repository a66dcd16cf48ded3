"""Rules of the strings that a schema's pattern allows, as they are written in JSON.

A string is one that the whole expression matches. Python's parser reads the expression, as a
validator in Python would; categories such as \\w are those of ASCII.
"""

import re
import re._constants as sre  # type: ignore[import-not-found] # private: typeshed omits it
import re._parser as sre_parser  # type: ignore[import-not-found] # private: typeshed omits it
from itertools import count
from typing import Any

from sglang_live.models.grammars.grammar_rules import (
    Characters,
    Element,
    Repeat,
    Rule,
    Rules,
    Sequence,
    Text,
)

# Repeats of a choice cost xgrammar time for each token. Beyond this bound: of plain characters.
_MOST_CHOICES = 32
_ESCAPED = {ord('"'): '\\"', ord("\\"): "\\\\", ord("\n"): "\\n", ord("\t"): "\\t"}
_PRINTED = frozenset(range(0x20, 0x7F))
_LAST = 0x10FFFF
_DIGITS = frozenset(map(ord, "0123456789"))
_WORD = _DIGITS | frozenset(map(ord, "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
_SPACE = frozenset(map(ord, " \t\n"))
_CATEGORIES = {
    sre.CATEGORY_DIGIT: _DIGITS,
    sre.CATEGORY_WORD: _WORD,
    sre.CATEGORY_SPACE: _SPACE,
    sre.CATEGORY_NOT_DIGIT: _PRINTED - _DIGITS,
    sre.CATEGORY_NOT_WORD: _PRINTED - _WORD,
    sre.CATEGORY_NOT_SPACE: _PRINTED - _SPACE,
}
_Ranges = list[tuple[int, int]]


class PatternError(ValueError):
    """No rules can be made of this expression."""


def pattern_rules(pattern: str, name: str) -> Rules:
    """Rules of which `name` is the first.

    Raises:
        PatternError: no expression, or with a part that is more than characters, groups,
            alternatives and repeats, or with an anchor in its middle.
    """
    try:
        tree = sre_parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"no regular expression: {error}") from None
    if tree.state.flags & ~re.UNICODE:
        raise PatternError("flags")
    writing = _Writing(name)
    writing.rules[name] = [writing.sequence(tree, begins=True, ends=True)]
    return writing.rules


class _Writing:
    def __init__(self, name: str):
        self.rules = Rules()
        self._names = (f"{name}_{n}" for n in count())

    def sequence(self, tree: Any, *, begins: bool, ends: bool) -> Sequence:
        """
        Args:
            begins, ends: whether anchors may stand at the beginning and at the end.
        """
        found: list[Element] = []
        for at, (kind, value) in enumerate(tree):
            begins, is_last = begins and not found, at == len(tree) - 1
            if kind is sre.AT:
                starts = value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING) and begins
                stops = value in (sre.AT_END, sre.AT_END_STRING) and ends and is_last
                if not starts and not stops:
                    raise PatternError("an anchor in the middle")
            elif kind is sre.SUBPATTERN and not value[1] and not value[2]:
                found += self.sequence(value[3], begins=begins, ends=ends and is_last)
            elif kind is sre.BRANCH:
                last = ends and is_last
                sides = [self.sequence(side, begins=begins, ends=last) for side in value[1]]
                found.append(self._rule(sides))
            elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
                found.append(self._repeat(*value))
            else:
                found += self._character(_set_of(kind, value))
        return tuple(found)

    def _rule(self, sides: list[Sequence]) -> Rule:
        name = next(self._names)
        self.rules[name] = sides
        return Rule(name)

    def _repeat(self, least: int, most: int, body: Any) -> Repeat:
        inner = self.sequence(body, begins=False, ends=False)
        if most == sre.MAXREPEAT:
            return Repeat(self._rule([inner]).name, int(least), None)
        if most > _MOST_CHOICES and len(body) == 1 and isinstance(inner[0], Rule):
            inner = self.rules[inner[0].name][0]  # its plain characters, without those in escapes
        return Repeat(self._rule([inner]).name, int(least), int(most))

    def _character(self, ranges: _Ranges) -> Sequence:
        """One character of the set, written as in a JSON string."""
        kept = _without(ranges, [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
        sides: list[Sequence] = [(Characters(tuple(kept)),)] if kept else []
        for code, escape in _ESCAPED.items():
            if any(low <= code <= high for low, high in ranges):
                sides.append((Text(escape),))
        if not sides:
            raise PatternError("a character that JSON cannot hold")
        return sides[0] if len(sides) == 1 else (self._rule(sides),)


def _set_of(kind: Any, value: Any) -> _Ranges:
    everything: _Ranges = [(0, _LAST)]
    if kind is sre.LITERAL:
        return [(value, value)]
    if kind is sre.NOT_LITERAL:
        return _without(everything, [(value, value)])
    if kind is sre.ANY:
        return _without(everything, [(10, 10), (13, 13), (0x2028, 0x2029)])
    if kind is not sre.IN:
        raise PatternError(str(kind).lower())
    found: _Ranges = []
    is_negated = has_category = False
    for inner, part in value:
        if inner is sre.NEGATE:
            is_negated = True
        elif inner is sre.LITERAL:
            found.append((part, part))
        elif inner is sre.RANGE:
            found.append(part)
        else:
            has_category = True
            found += [(code, code) for code in _CATEGORIES[part]]
    if is_negated:
        # The categories of a validator have characters beyond ASCII, too.
        found = _without([(0x20, 0x7E)] if has_category else everything, found)
    return found


def _without(ranges: _Ranges, holes: _Ranges) -> _Ranges:
    for first, last in holes:
        cut: _Ranges = []
        for low, high in ranges:
            cut += [(low, min(high, first - 1)), (max(low, last + 1), high)]
        ranges = [(low, high) for low, high in cut if low <= high]
    return ranges
