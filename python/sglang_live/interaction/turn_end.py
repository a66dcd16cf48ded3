"""Turn end: how long a silence lasts before it ends the user's turn.

In: a pause, the endpoint model's score of it, and the turn's words if they are known. Out: the
verdict, of which the silence that ends the turn is a part.
Pure: the gateway and benchmark.turn_taking decide by the same functions.

At first the score and the words tell how probable it is that the turn is over. While the silence
goes on that becomes more probable, because the lengths of pauses within turns are log-normal and
most of them would be over. While the silence lasts it is scored again, and the least score counts:
longer silences sound more like an end in any case. The turn ends after the silence of the least
expected cost: dead air counts by the square of its length, and an end within the turn as much as
dead air of `cutoff_ms`.
training/turn_end fits the numbers in turn_end.json.

Words that end within a sentence ("I would like to", "and then um") are evidence that the turn goes
on. People pause after complete sentences as well as within them, so that a complete one is no
evidence. A turn that ends within a sentence is rare, though. training/turn_end/words.py fits the
numbers of turn_words.json to the punctuation of transcribed meetings; the text's own punctuation is
not used, because a recogniser sets a full stop after any clip.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

WEIGHTS = Path(__file__).with_name("turn_end.json")
WORD_WEIGHTS = Path(__file__).with_name("turn_words.json")
# Longer than the closure of a stop consonant; the endpoint model was trained on such pauses.
PAUSE_MS = 200
# Silences after which the pause is scored. Each score takes a core for some tens of ms, and scores
# every 100 ms tell ends from pauses no better (docs/turn_taking.md).
SCORED_AT_MS = (PAUSE_MS, 400, 700)
# A longer silence ends every turn.
MAX_WAIT_MS = 3000
# The endpoint model's scores of 0 and 1 are not certain.
_LEAST_SCORE = 1e-4
# Of human recordings, scores between 5 and 95 % are as frequent in pauses as at ends of turns.
_VAGUE_LOG_ODDS = 3.0

LANGUAGE = "en"  # of the words that are evidence
# Behind them nothing changes, and a transcript may be long.
MOST_WORDS = 32
# Of 946 requests to an agent, 2 in a thousand have lower log-odds of being complete, and 36 have
# log-odds below 0; of pauses within turns a quarter and a third (turn_words.json).
_VAGUE_WORDS_LOG_ODDS = -0.85

_BETWEEN_WORDS = re.compile(r"[^\w'-]+")
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEndWeights:
    """
    bias, score: of the log-odds that a pause is the turn's end: their constant, and how much the
        evidence of the score counts.
    pause_log_mean, pause_log_sd: of the logarithm of the length in ms of pauses within turns, cut
        at PAUSE_MS.
    cutoff_ms: by eagerness.
    """

    bias: float
    score: float
    pause_log_mean: float
    pause_log_sd: float
    cutoff_ms: dict[str, float]

    def log_odds(self, score: float) -> float:
        """That a pause is the turn's end, before it is known how long it lasts."""
        return self.bias + self.score * score_evidence(score)

    def wait_ms(self, log_odds: float, cutoff_ms: float) -> float:
        """The silence that ends the turn: PAUSE_MS to MAX_WAIT_MS, less for higher log-odds.

        The expected cost of a wait w is odds * w**2 + cutoff_ms**2 * P(a pause is longer than w).
        It is least at PAUSE_MS or where its slope is 0: of a log-normal length, the root of a
        quadratic.
        """
        mean, sd = self.pause_log_mean, self.pause_log_sd
        seen = _longer(PAUSE_MS, mean, sd)
        slope = log_odds - 2 * math.log(cutoff_ms) + math.log(2 * seen * sd * math.sqrt(math.tau))
        root = 4 * sd**2 - 2 * (2 * mean + slope)
        if root < 0:
            return PAUSE_MS
        wait = math.exp(min(mean + sd * (math.sqrt(root) - 2 * sd), math.log(MAX_WAIT_MS)))
        saved = cutoff_ms**2 * (1 - _longer(wait, mean, sd) / seen)
        costs = math.exp(log_odds) * (wait**2 - PAUSE_MS**2)
        return wait if wait > PAUSE_MS and saved > costs else PAUSE_MS


def score_evidence(score: float) -> float:
    """By how much the log-odds of a score exceed those of scores that say nothing."""
    log_odds = math.log((score + _LEAST_SCORE) / (1 - score + _LEAST_SCORE))
    return math.copysign(max(abs(log_odds) - _VAGUE_LOG_ODDS, 0.0), log_odds)


def _longer(ms: float, mean: float, sd: float) -> float:
    """Probability that a log-normal length exceeds ms."""
    return _NORMAL.cdf((mean - math.log(ms)) / sd)


@cache
def trained_weights() -> TurnEndWeights:
    return TurnEndWeights(**json.loads(WEIGHTS.read_text("utf-8"))["weights"])


def cutoff_ms(eagerness: str) -> float:
    """What an end of a turn within the turn costs, by eagerness: low, medium, high, auto."""
    return trained_weights().cutoff_ms[eagerness]


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    wait_ms: the silence that ends it.
    likely: nothing says that the turn goes on.
    """

    wait_ms: int
    likely: bool


def judged(score: float, cutoff_ms: float, words: float = 0.0) -> Verdict:
    """Of a pause with this score of the endpoint model, and this evidence of the turn's words."""
    weights = trained_weights()
    log_odds = weights.log_odds(score) + words
    wait_ms = weights.wait_ms(log_odds, cutoff_ms)
    return Verdict(round(wait_ms), score_evidence(score) + words >= 0)


def silence_ms(cutoff_ms: float) -> int:
    """The silence that ends a turn whose pause has no score."""
    weights = trained_weights()
    return round(weights.wait_ms(weights.bias, cutoff_ms))


# --- words ---


class WordWeights(NamedTuple):
    """Of the log-odds that a sentence is complete: their constant, and those of features."""

    bias: float
    features: dict[str, float]


def words_of(text: str) -> list[str]:
    """The last MOST_WORDS words of a text, without capitals and punctuation."""
    return _BETWEEN_WORDS.sub(" ", text.casefold().replace("’", "'")).split()[-MOST_WORDS:]


def features(words: Sequence[str]) -> list[str]:
    """What counts of words: the last, the first ones, and how many there are."""
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
    weights = trained_word_weights()
    return weights.bias + sum(weights.features.get(name, 0.0) for name in features(words))


def word_evidence(text: str, language: str | None = None) -> float:
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
    return min(0.0, complete_log_odds(words) - _VAGUE_WORDS_LOG_ODDS)


def _is_english(words: Sequence[str]) -> bool:
    known = trained_word_weights().features
    return 2 * sum(word in known or f"-{word}" in known for word in words) > len(words)


@cache
def trained_word_weights() -> WordWeights:
    weights = json.loads(WORD_WEIGHTS.read_text(encoding="utf-8"))["weights"]
    return WordWeights(weights["bias"], weights["features"])
