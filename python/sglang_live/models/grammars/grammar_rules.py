"""Rules of a grammar as data, read from xgrammar and written as the EBNF that it reads.

A rule is a list of alternatives, each a sequence of elements. Lookaheads are left out: they only
speed up xgrammar's masks, and it finds its own.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xgrammar import Grammar

# Kinds of expressions in a serialised grammar.
_BYTES, _CLASS, _CLASS_STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 0, 1, 2, 3, 4, 5, 6, 8
_LAST_CHARACTER = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Characters:
    """One character: in one of the ranges, or in none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def __contains__(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self.ranges) != self.negated

    def any_of(self, preferred: str) -> str:
        """One of the preferred characters, else the first of the set."""
        found = next((char for char in preferred if ord(char) in self), None)
        if found is not None:
            return found
        starts = [0, *(high + 1 for _, high in self.ranges)]
        codes = starts if self.negated else [low for low, _ in self.ranges]
        return chr(min(code for code in codes if code in self))

    def __str__(self) -> str:
        parts = [part for low, high in self.ranges for part in _parts(low, high)]
        ranges = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in parts)
        return f"[{'^' if self.negated else ''}{ranges}]"


@dataclass(frozen=True, slots=True)
class Text:
    text: str

    def __str__(self) -> str:
        return json.dumps(self.text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Rule:
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Repeat:
    """most: None: any number."""

    name: str
    least: int
    most: int | None

    def __str__(self) -> str:
        return f"{self.name}{{{self.least},{'' if self.most is None else self.most}}}"


Element = Characters | Text | Rule | Repeat
Sequence = tuple[Element, ...]
Rules = dict[str, list[Sequence]]
ROOT = "root"


def written(rules: Rules) -> str:
    """EBNF of the rules that the root needs."""
    lines, seen, pending = [], {ROOT}, [ROOT]
    while pending:
        name = pending.pop()
        sides = [" ".join(map(str, sequence)) or '""' for sequence in rules[name]]
        lines.append(f"{name} ::= {' | '.join(f'({side})' for side in sides)}\n")
        for sequence in rules[name]:
            for element in sequence:
                if isinstance(element, Rule | Repeat) and element.name not in seen:
                    seen.add(element.name)
                    pending.append(element.name)
    return "".join(lines)


def rules_of(grammar: "Grammar", prefix: str = "") -> Rules:
    """
    Args:
        prefix: put before all names.
    Raises:
        ValueError: the grammar has a kind of expression that is not read here.
    """
    form = json.loads(grammar.serialize_json())
    reading = _Reading(form, [prefix + rule[0] for rule in form["rules"]])
    numbers = (rule[1] for rule in form["rules"])
    found = {name: reading.sides(n) for name, n in zip(reading.names, numbers, strict=True)}
    return found | reading.starred


class _Reading:
    """starred: rules that the reader adds for repeated characters."""

    def __init__(self, form: dict, names: list[str]):
        self.names = names
        self.starred = Rules()
        self._data = form["grammar_expr_data"]
        self._at = form["grammar_expr_indptr"]

    def _expression(self, number: int) -> tuple[int, list[int]]:
        at = self._at[number]
        return self._data[at], self._data[at + 2 : at + 2 + self._data[at + 1]]

    def sides(self, number: int) -> list[Sequence]:
        kind, values = self._expression(number)
        if kind != _CHOICES:
            return [self._sequence(number)]
        return [self._sequence(side) for side in values]

    def _sequence(self, number: int) -> Sequence:
        kind, values = self._expression(number)
        if kind == _SEQUENCE:
            return tuple(self._element(element) for element in values)
        return () if kind == _EMPTY else (self._element(number),)

    def _element(self, number: int) -> Element:
        kind, values = self._expression(number)
        match kind:
            case 0:
                return Text(bytes(values).decode())
            case 1:
                return _characters(values)
            case 2:
                characters = _characters(values)
                name = f"star_{len(self.starred)}"
                self.starred[name] = [(characters,)]
                return Repeat(name, 0, None)
            case 4:
                return Rule(self.names[values[0]])
            case 8:
                rule, least, most = values
                return Repeat(self.names[rule], least, None if most < 0 else most)
        raise ValueError(f"expressions of kind {kind} are not read")


def _parts(low: int, high: int) -> list[tuple[int, int]]:
    # xgrammar makes a dead end of a range beyond ASCII whose last byte is the last that there is.
    if low < high < _LAST_CHARACTER and high > 0x7F and high & 0x3F == 0x3F:
        return [(low, high - 1), (high, high)]
    return [(low, high)]


def _characters(values: list[int]) -> Characters:
    negated, *ends = values
    return Characters(tuple(zip(ends[::2], ends[1::2], strict=True)), bool(negated))
