"""Sentences outside the demo model's world, to which UNKNOWN is the right answer.

Three kinds, because each fails differently: plain sentences, questions of the world with another
key word (near misses, which invite a confident wrong answer), and words in random order.
"""

import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

from training.demo import world

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))
NOUNS, VERBS, ADJECTIVES, PLACES = (
    tuple(_WORDS[kind].split()) for kind in ("nouns", "verbs", "adjectives", "places")
)
_PEOPLE = (
    "he", "she", "we", "they", "someone", "nobody", "everyone", "my brother", "my neighbour",
    "our teacher", "the captain", "two children",
)  # fmt: skip
_TIMES = (
    "yesterday", "last week", "this morning", "on monday", "in the summer", "at noon",
    "after lunch", "before dinner", "all day", "every year", "once again", "in a hurry",
)  # fmt: skip
_REQUESTS = (
    "open the {n}", "close the {n}", "turn off the {n}", "turn on the {a} {n}", "play the next {n}",
    "where is my {n}", "how much does a {n} cost", "is there a {n} near here", "call my {n}",
    "order a {a} {n} for me", "how do i fix a {n}", "when does the {n} open", "read the {n}",
    "show me the {n} in {p}", "how far is it to {p}", "book a {n} to {p}", "i lost my {a} {n}",
    "what is a {n}", "why is the {n} so {a}", "can you find my {n}", "write a letter to my {n}",
)  # fmt: skip
_NEAR = (
    "what is the capital of {p}", "what color is the {n}", "what do {n}s eat", "how far is the {n}",
    "what is the meaning of {n}", "tell me about the {n}", "tell me a {n}", "what is your {n}",
    "who made the {n}", "how old is the {n}", "is your {n} {a}", "do you like the {n}",
    "where is the {n} from", "what can a {n} do", "how many {n}s are in a {n}", "are you a {n}",
    "what is the largest {n}", "do you know the {n}", "remember the {n}", "my {n} is {a}",
    "count the {n}s", "thank the {n}", "can you see the {n}", "good {n}", "is the {n} listening",
    "what time does the {n} open", "what was the {n}", "who is the {n}", "how does the {n} work",
)  # fmt: skip


def unknown_sentences(rng: random.Random) -> Iterator[str]:
    """An endless iterator of sentences of 2 to 12 words; none is a question of the world."""
    known = set(world.questions())
    while True:
        sentence = _sentence(rng)
        if sentence not in known:
            yield sentence


def _sentence(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return _filled(rng, rng.choice(_NEAR))
    if kind < 0.60:
        return _filled(rng, rng.choice(_REQUESTS))
    if kind < 0.90:
        plain = "{w} {v} the {a} {n}" if rng.random() < 0.5 else "{w} {v} a {n} and the {a} {n}"
        tail = f" {rng.choice(_TIMES)}" if rng.random() < 0.5 else ""
        return _filled(rng, plain) + tail
    words = [rng.choice(rng.choice((NOUNS, VERBS, ADJECTIVES))) for _ in range(rng.randint(2, 9))]
    return " ".join(words)


def _filled(rng: random.Random, form: str) -> str:
    choices = {"n": NOUNS, "v": VERBS, "a": ADJECTIVES, "p": PLACES, "w": _PEOPLE}
    for slot, words in choices.items():
        while f"{{{slot}}}" in form:
            form = form.replace(f"{{{slot}}}", rng.choice(words), 1)
    return form
