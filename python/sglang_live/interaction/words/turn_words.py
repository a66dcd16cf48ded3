"""Whether the words of a turn so far end within a sentence: "I would like to", "and then um".

In: the transcript of a turn up to a pause. Out: evidence for interaction/turn_end.py. Pure.

People pause after complete sentences as well as within them, so that a complete one is no evidence.
A turn that ends within a sentence is rare, though. training/turn_end/words.py fits the numbers of
turn_words.json to the punctuation of transcribed meetings; the text's own punctuation is not used,
because a recogniser sets a full stop after any clip.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

WEIGHTS = Path(__file__).with_name("turn_words.json")
LANGUAGE = "en"
# Behind them nothing changes, and a transcript may be long.
MOST_WORDS = 32

# Of 946 requests to an agent, 2 in a thousand have lower log-odds of being complete, and 36 have
# log-odds below 0; of pauses within turns a quarter and a third (turn_words.json).
_VAGUE_LOG_ODDS = -0.85

_BETWEEN = re.compile(r"[^\w'-]+")


class WordWeights(NamedTuple):
    """Of the log-odds that a sentence is complete: their constant, and those of features."""

    bias: float
    features: dict[str, float]


def words_of(text: str) -> list[str]:
    """The last MOST_WORDS words of a text, without capitals and punctuation."""
    return _BETWEEN.sub(" ", text.casefold().replace("’", "'")).split()[-MOST_WORDS:]


def features(words: Sequence[str]) -> list[str]:
    """What counts: the last words, the first ones, and how many there are."""
    third, second, last = ["", "", "", *words][-3:]
    first = " ".join(words[:2]) if len(words) > 1 else ""
    return [
        last,
        f"{second} {last}",
        f"{third} {second} {last}",
        f"-{second}",
        f"^{first}",
        f"#{len(words).bit_length()}",
    ]


def complete_log_odds(words: Sequence[str]) -> float:
    """That the words are a complete sentence."""
    weights = trained_weights()
    return weights.bias + sum(weights.features.get(name, 0.0) for name in features(words))


def evidence(text: str, language: str | None = None) -> float:
    """What the words add to the log-odds that the turn is over: 0 or less.

    Args:
        language: of the speech, as a code such as "en" or "en-GB"; None: not known. Only English
            words are evidence, and if the language is not known, most of them must be common ones.
    """
    if language is not None and language.casefold().split("-")[0] not in (LANGUAGE, "english"):
        return 0.0
    words = words_of(text)
    if not words or (language is None and not _is_english(words)):
        return 0.0
    return min(0.0, complete_log_odds(words) - _VAGUE_LOG_ODDS)


def _is_english(words: Sequence[str]) -> bool:
    known = trained_weights().features
    return 2 * sum(word in known or f"-{word}" in known for word in words) > len(words)


@cache
def trained_weights() -> WordWeights:
    weights = json.loads(WEIGHTS.read_text(encoding="utf-8"))["weights"]
    return WordWeights(weights["bias"], weights["features"])
