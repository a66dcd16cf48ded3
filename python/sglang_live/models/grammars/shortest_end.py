"""The shortest text that completes what was written so far, by a grammar.

In: characters, one by one. Out: how many are missing at least, and which.
Owner: one EndFinder per response. Pure Python: a character costs some microseconds, about ten in
all for a token's worth of bookkeeping beside xgrammar, which remains the judge of what fits.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import islice

from sglang_live.models.grammars.grammar_rules import (
    ROOT,
    Characters,
    Element,
    Repeat,
    Rule,
    Rules,
    Sequence,
    Text,
)

_PREFERRED = "a0 "
# Repeats that are long enough: of digits, of characters, and of anything else.
MOST_DIGITS, MOST_CHARACTERS, MOST_ITEMS = 14, 1_000, 64
_DIGIT = Characters(((48, 57),))
_NEVER = 1 << 40
# Readings of one text. A grammar with more of them is not followed any further.
_MOST_READINGS = 256


class ShortestTexts:
    """The rules with the least length of each.

    Raises:
        ValueError: nothing fits a rule that the root needs.
    """

    def __init__(self, rules: Rules):
        self.sides: dict[str, list[Sequence]] = {
            name: [_by_character(side) for side in sides] for name, sides in rules.items()
        }
        self.least = dict.fromkeys(self.sides, _NEVER)
        users: dict[str, set[str]] = {name: set() for name in self.sides}
        for name, sides in self.sides.items():
            for element in (element for side in sides for element in side):
                if isinstance(element, Rule | Repeat):
                    users[element.name].add(name)
        pending = list(self.sides)
        while pending:
            name = pending.pop()
            least = min(map(self.least_of, self.sides[name]))
            if least < self.least[name]:
                self.least[name] = least
                pending += users[name]
        if self.least[ROOT] >= _NEVER:
            raise ValueError("nothing fits the grammar")
        self.enough = {name: _enough(sides) for name, sides in self.sides.items()}
        self.start: Sequence = (Rule(ROOT),)
        self._rest = {
            id(side): [self.least_of(side[at:]) for at in range(len(side) + 1)]
            for side in (self.start, *(side for sides in self.sides.values() for side in sides))
        }

    def rest(self, side: Sequence, at: int) -> int:
        """Least length of a sequence of these rules from a place on."""
        return self._rest[id(side)][at]

    def least_of(self, side: Sequence) -> int:
        return sum(map(self._least, side))

    def _least(self, element: Element) -> int:
        match element:
            case Rule(name):
                return self.least[name]
            case Repeat(name, least):
                return least * self.least[name] if least else 0
        return 1

    def text_of(self, side: Sequence) -> Iterator[str]:
        """The characters of the shortest text of a sequence."""
        pending = list(reversed(side))
        while pending:
            match pending.pop():
                case Characters() as one:
                    yield one.any_of(_PREFERRED)
                case Rule(name):
                    shortest: Sequence = min(self.sides[name], key=self.least_of)
                    pending += reversed(shortest)
                case Repeat(name, least, most):
                    if least > 0:
                        pending += (Repeat(name, least - 1, most), Rule(name))

    @cached_property
    def longest_detour(self) -> Sequence:
        """Sequence of the longest text that one choice can make necessary."""
        found: Sequence = ()
        for name, sides in self.sides.items():
            longest = max(sides, key=self.least_of)
            n_more = self.least_of(longest) - self.least[name]
            if self.least_of(found) < n_more < _NEVER:
                found = longest
            for side in sides:
                for element in side:
                    if not isinstance(element, Repeat) or element.least == element.most:
                        continue
                    if self.least_of(found) < self.least[element.name]:
                        found = (Rule(element.name),)
        return found


class _Place:
    """A place in a sequence, and what follows behind it.

    n: times that the repeat at this place was read.
    missing: characters to the end of everything, at least.
    has_enough: whether a repeat here or behind is long enough.
    """

    __slots__ = ("_heads", "at", "behind", "has_enough", "missing", "n", "side", "texts")

    def __init__(
        self, texts: ShortestTexts, side: Sequence, at: int, n: int, behind: "_Place | None"
    ):
        self.texts = texts
        self.side = side
        self.at = at
        self.n = n
        self.behind = behind
        left = texts.rest(side, at)
        self.has_enough: bool = behind is not None and behind.has_enough
        if n:
            repeat = side[at]
            assert isinstance(repeat, Repeat)
            self.has_enough |= n >= max(repeat.least, texts.enough[repeat.name])
            left -= min(n, repeat.least) * texts.least[repeat.name]
        self.missing: int = left + (behind.missing if behind else 0)
        self._heads: list[tuple[Characters, _Place]] | None = None

    @property
    def key(self) -> tuple[int, int, int, int]:
        return id(self.side), self.at, self.n, id(self.behind)

    def text(self) -> Iterator[str]:
        place: _Place | None = self
        while place is not None and place.side:
            rest = place.side[place.at :]
            if place.n:
                repeat = rest[0]
                assert isinstance(repeat, Repeat)
                left = Repeat(repeat.name, max(0, repeat.least - place.n), None)
                rest = (left, *rest[1:])
            yield from place.texts.text_of(rest)
            place = place.behind

    def heads(self) -> list[tuple[Characters, "_Place"]]:
        """The characters that may come next, and the places behind them."""
        if self._heads is None:
            self._heads = list(_heads(self))
        return self._heads


def _heads(first: _Place) -> Iterator[tuple[Characters, _Place]]:
    seen: set[tuple[int, int, int]] = set()
    places = {first.key: first}  # equal places are one object, so that readings can be compared

    def place(side: Sequence, at: int, n: int, behind: _Place | None) -> _Place | None:
        if at == len(side):
            return behind
        made = _Place(first.texts, side, at, n, behind)
        return places.setdefault(made.key, made)

    pending: list[_Place | None] = [first]
    while pending:
        here = pending.pop()
        if here is None:
            continue
        # Without n: a repeat of nothing ends.
        key = (id(here.side), here.at, id(here.behind))
        if key in seen and here.n:
            continue
        seen.add(key)
        element, behind = here.side[here.at], place(here.side, here.at + 1, 0, here.behind)
        if isinstance(element, Characters):
            yield element, behind or _DONE
            continue
        assert isinstance(element, Rule | Repeat)
        if isinstance(element, Repeat):
            if here.n >= element.least or first.texts.least[element.name] == 0:
                pending.append(behind)
            if element.most is not None and here.n >= element.most:
                continue
            behind = place(here.side, here.at, here.n + 1, here.behind)
        pending += [place(side, 0, 0, behind) for side in first.texts.sides[element.name] if side]
        if isinstance(element, Rule) and () in first.texts.sides[element.name]:
            pending.append(behind)


class EndFinder:
    def __init__(self, texts: ShortestTexts):
        start = _Place(texts, texts.start, 0, 0, None)
        self._places: list[_Place] = [start]

    @property
    def lost(self) -> bool:
        """Whether the text is not followed any more."""
        return not self._places

    def take(self, text: str) -> None:
        for char in text:
            code, found = ord(char), dict[tuple[int, int, int, int], _Place]()
            for place in self._places:
                for characters, behind in place.heads():
                    if code in characters:
                        found.setdefault(behind.key, behind)
            self._places = list(found.values()) if len(found) <= _MOST_READINGS else []

    @property
    def n_missing(self) -> int:
        return min(place.missing for place in self._places)

    @property
    def has_enough(self) -> bool:
        """Whether the text is in a repeat that is long enough."""
        return min(self._places, key=lambda place: place.missing).has_enough

    def missing(self, most: int) -> str:
        """The shortest text that completes what was taken, or its beginning.

        Args:
            most: characters of it.
        """
        shortest = min(self._places, key=lambda place: place.missing)
        return "".join(islice(shortest.text(), most))


def _enough(sides: list[Sequence]) -> int:
    if sides == [(_DIGIT,)]:
        return MOST_DIGITS
    # An escape is a character of two.
    is_text = all(
        len(side) < 3 and all(isinstance(one, Characters) for one in side) for side in sides
    )
    return MOST_CHARACTERS if is_text else MOST_ITEMS


def _by_character(side: Sequence) -> Sequence:
    found: list[Element] = []
    for element in side:
        if isinstance(element, Text):
            found += [Characters(((ord(char), ord(char)),)) for char in element.text]
        else:
            found.append(element)
    return tuple(found)


_DONE = object.__new__(_Place)
_DONE.side = ()
_DONE.at = 0
_DONE.n = 0
_DONE.behind = None
_DONE.missing = 0
_DONE.has_enough = False
_DONE._heads = []
