"""The demo model's world: its questions, their answers, and what it remembers of a user.

Sentences are written as they are spoken. Questions are plain words; capitals and punctuation of
typed questions are varied where they are used.
"""

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

UNKNOWN = "I did not understand that. Please ask me something else."

# Ways to ask, and the answer.
Fact = tuple[tuple[str, ...], str]

_KNOWN = tomllib.loads(Path(__file__).with_name("world.toml").read_text("utf-8"))
_ONES = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty")


def number_word(n: int) -> str:
    """1 to 59 in words.

    Raises:
        ValueError: for others.
    """
    if not 1 <= n <= 59:
        raise ValueError(f"{n} is not a number of this world")
    if n < 20:
        return _ONES[n - 1]
    tens, ones = divmod(n, 10)
    return _TENS[tens - 2] + (f" {_ONES[ones - 1]}" if ones else "")


def _facts(kind: str) -> tuple[Fact, ...]:
    return tuple((tuple(fact["ask"]), fact["answer"]) for fact in _KNOWN[kind])


FACTS = _facts("facts")
# Long answers, so that there is something to interrupt.
LONG = (
    *_facts("long"),
    (
        ("count to fifty", "please count to fifty"),
        "Let us count. " + ", ".join(number_word(n) for n in range(1, 51)) + ".",
    ),
)

NAMES = (
    "Anna", "Peter", "Maria", "George", "Susan", "Oliver", "Emma", "Victor", "Julia", "Martin",
    "Sophie", "Daniel", "Laura", "Thomas", "Alice", "Robert",
)  # fmt: skip
NUMBERS = tuple(range(1, 21))

_TELL_NAME = ("my name is {}", "i am called {}", "you can call me {}")
_ASK_NAME = ("what is my name", "do you know my name", "who am i")
_TELL_NUMBER = ("remember the number {}", "my number is {}", "please remember {}")
_ASK_NUMBER = ("what was my number", "which number did i say", "what is my number")

_NAME_TOLD, _NAME_KNOWN = "{}, what a lovely name.", "{} is your name."
_NAME_MISSING = "You have not told me your name yet."
_NUMBER_TOLD, _NUMBER_KNOWN = "{}, noted and kept.", "{} was your number."
_NUMBER_MISSING = "You have not told me a number yet."


@dataclass(frozen=True, slots=True)
class Exchange:
    question: str
    answer: str


@dataclass(slots=True)
class Memory:
    """What a user has told about themselves in this conversation."""

    name: str | None = None
    number: int | None = None

    def tell_name(self, rng: random.Random, name: str) -> Exchange:
        self.name = name
        return Exchange(rng.choice(_TELL_NAME).format(name.lower()), _NAME_TOLD.format(name))

    def tell_number(self, rng: random.Random, number: int) -> Exchange:
        self.number = number
        word = number_word(number)
        told = _NUMBER_TOLD.format(word.capitalize())
        return Exchange(rng.choice(_TELL_NUMBER).format(word), told)

    def ask_name(self, rng: random.Random) -> Exchange:
        known = _NAME_MISSING if self.name is None else _NAME_KNOWN.format(self.name)
        return Exchange(rng.choice(_ASK_NAME), known)

    def ask_number(self, rng: random.Random) -> Exchange:
        if self.number is None:
            return Exchange(rng.choice(_ASK_NUMBER), _NUMBER_MISSING)
        word = number_word(self.number).capitalize()
        return Exchange(rng.choice(_ASK_NUMBER), _NUMBER_KNOWN.format(word))


@dataclass(slots=True)
class User:
    """A simulated user: questions in random order; a third of them are outside this world.

    unknown: sentences to which UNKNOWN is the answer, endless.
    """

    rng: random.Random
    unknown: Iterator[str]
    memory: Memory = field(default_factory=Memory)

    def next(self) -> Exchange:
        rng, memory = self.rng, self.memory
        kind = rng.random()
        if kind < 0.33:
            return Exchange(next(self.unknown), UNKNOWN)
        if kind < 0.45:
            return memory.tell_name(rng, rng.choice(NAMES))
        if kind < 0.53:
            return memory.ask_name(rng)
        if kind < 0.62:
            return memory.tell_number(rng, rng.choice(NUMBERS))
        if kind < 0.70:
            return memory.ask_number(rng)
        questions, answer = rng.choice(LONG) if kind < 0.73 else rng.choice(FACTS)
        return Exchange(rng.choice(questions), answer)


def questions() -> list[str]:
    """All wordings of all questions."""
    fixed = [q for ways, _ in (*FACTS, *LONG) for q in ways]
    names = [way.format(name.lower()) for name in NAMES for way in _TELL_NAME]
    numbers = [way.format(number_word(n)) for n in NUMBERS for way in _TELL_NUMBER]
    return [*fixed, *_ASK_NAME, *_ASK_NUMBER, *names, *numbers]


def answers() -> list[str]:
    """All answers: the talker is trained to speak these."""
    fixed = [answer for _, answer in (*FACTS, *LONG)]
    names = [form.format(name) for name in NAMES for form in (_NAME_TOLD, _NAME_KNOWN)]
    numbers = [
        form.format(number_word(n).capitalize())
        for n in NUMBERS
        for form in (_NUMBER_TOLD, _NUMBER_KNOWN)
    ]
    return [*fixed, UNKNOWN, _NAME_MISSING, _NUMBER_MISSING, *names, *numbers]
