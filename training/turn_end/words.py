"""Fit the numbers of interaction/turn_words.json to the words of the AMI meetings.

    python -m training.turn_end.words --ami DIR

DIR: the folder `words` of the AMI Meeting Corpus's manual annotations 1.6.2
(`ami_public_manual_1.6.2.zip`, CC BY 4.0). Of each silence of PAUSE_MS behind a word it is known
whether a full stop, a question mark or an exclamation mark follows the word, and whether the
speaker's turn is over. A fifth of the groups of meetings is kept apart for the figures, and what
users write to an agent (benchmark/workloads/coffee_dialogues.jsonl.gz) is compared with them. It
takes a minute.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from benchmark.turn_taking.cutting import (
    BACKCHANNELS,
    Unit,
    is_backchannel,
    spurts,
    spurts_of_turns,
)
from benchmark.turn_taking.layouts import words as units_of
from benchmark.turn_taking.scoring import auc
from sglang_live.interaction.turn_end import MOST_WORDS, WORD_WEIGHTS, features, words_of

DIALOGUES = Path(__file__).parents[2] / "benchmark" / "workloads" / "coffee_dialogues.jsonl.gz"
# A word that fewer groups of meetings use is one of their topic.
_MIN_GROUPS = 10
_RIDGE = 5.0
_TEST_SHARE = 5
# Shares of silences whose words are less probably complete than this.
_BOUNDS = (0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True, slots=True)
class Silence:
    """
    group: of meetings with the same speakers and the same task.
    words: of the turn up to the silence.
    complete: a sentence ends here.
    is_end: the turn is over; another speaker has the next one.
    """

    group: str
    words: tuple[str, ...]
    complete: bool
    is_end: bool


@dataclass(frozen=True, slots=True)
class Fit:
    bias: float
    weights: dict[str, float]

    def log_odds(self, words: Sequence[str]) -> float:
        return self.bias + sum(self.weights.get(name, 0.0) for name in features(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ami", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    silences = read_silences(args.ami)
    groups = sorted({one.group for one in silences})
    test = {groups[at] for at in range(0, len(groups), _TEST_SHARE)}
    apart = [one for one in silences if one.group in test]
    own = fitted([one for one in silences if one.group not in test])
    figures = figures_of(own, apart) | {"share_of_requests_below": shares_below(own, requests())}
    fit = fitted(silences)
    document = {
        "what": "Weights of interaction/turn_end.py, fitted by python -m training.turn_end.words",
        "data": f"{len(silences)} silences of {len(groups)} groups of meetings of the AMI Meeting "
        "Corpus, manual annotations 1.6.2, words and punctuation",
        "licences": "AMI Meeting Corpus CC BY 4.0",
        "figures_of_groups_kept_apart": figures,
        "weights": {"bias": round(fit.bias, 3), "features": rounded(fit.weights)},
    }
    WORD_WEIGHTS.write_text(json.dumps(document, indent=0, ensure_ascii=False) + "\n", "utf-8")
    print(json.dumps(figures, indent=1))


def read_silences(folder: Path) -> list[Silence]:
    """Silences behind the words of all speakers, but for those of listeners' short words."""
    meetings = sorted({path.name.split(".")[0] for path in folder.glob("*.words.xml")})
    return [one for meeting in meetings for one in _silences_of(folder, meeting)]


def _silences_of(folder: Path, meeting: str) -> Iterator[Silence]:
    paths = sorted(folder.glob(f"{meeting}.*.words.xml"))
    units = [unit for path in paths for unit in units_of(path)]
    complete = {at for path in paths for at in _sentence_ends(path)}
    for speaker in sorted({unit.speaker for unit in units}):
        own = spurts(unit for unit in units if unit.speaker == speaker)
        for turn in spurts_of_turns(own, _taken_ms(units, speaker)):
            said: list[str] = []
            for spurt in turn:
                said += words_of(" ".join(unit.text or "" for unit in spurt if _is_word(unit)))
                if any(word.replace("-", "") not in BACKCHANNELS for word in said):
                    last = spurt[-1]
                    yield Silence(
                        group=meeting.rstrip("abcd"),
                        words=tuple(said[-MOST_WORDS:]),
                        complete=(speaker, last.end_ms) in complete,
                        is_end=spurt is turn[-1],
                    )


def _is_word(unit: Unit) -> bool:
    return not (unit.text or "").startswith("[")


def _taken_ms(units: Sequence[Unit], speaker: str) -> list[float]:
    """Where other speakers take the turn."""
    others = sorted({unit.speaker for unit in units} - {speaker})
    found = [spurt for name in others for spurt in spurts(u for u in units if u.speaker == name)]
    return [spurt[0].start_ms for spurt in found if not is_backchannel(spurt)]


def _sentence_ends(path: Path) -> Iterator[tuple[str, float]]:
    """Speaker and end in ms of each word that punctuation says is a sentence's last."""
    speaker, end = path.name.removesuffix(".words.xml"), None
    for element in ElementTree.parse(path).getroot():
        if element.get("punc"):
            if end is not None and (element.text or "")[:1] in (".", "?", "!"):
                yield speaker, 1000 * float(end)
        elif element.tag == "w":
            end = element.get("endtime")


def fitted(silences: Sequence[Silence]) -> Fit:
    """Logistic regression of `complete` with a ridge."""
    groups = defaultdict(set)
    found = [features(one.words) for one in silences]
    for one, names in zip(silences, found, strict=True):
        for name in names:
            groups[name].add(one.group)
    index = {
        name: at
        for at, name in enumerate(n for n, used in groups.items() if len(used) >= _MIN_GROUPS)
    }
    rows, columns = [], []
    for row, names in enumerate(found):
        known = [index[name] for name in names if name in index]
        rows += [row] * len(known)
        columns += known
    row_of, column_of = np.array(rows), np.array(columns)
    complete = np.array([float(one.complete) for one in silences])
    weights = _minimised(row_of, column_of, complete, len(index))
    return Fit(float(weights[-1]), {name: float(weights[at]) for name, at in index.items()})


def _minimised(
    rows: np.ndarray, columns: np.ndarray, complete: np.ndarray, n_features: int
) -> np.ndarray:
    """[n_features + 1] weights, the constant last."""
    from scipy.optimize import minimize

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        odds = np.bincount(rows, weights[columns], minlength=len(complete)) + weights[-1]
        error = 1 / (1 + np.exp(-odds)) - complete
        value = np.logaddexp(0, odds).sum() - complete @ odds
        slope = np.bincount(columns, error[rows], minlength=n_features)
        ridge = _RIDGE * weights[:-1]
        return value + weights[:-1] @ ridge / 2, np.append(slope + ridge, error.sum())

    start = np.zeros(n_features + 1)
    return minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 300}).x


def figures_of(fit: Fit, silences: Sequence[Silence]) -> dict:
    odds = np.array([fit.log_odds(one.words) for one in silences])
    complete, is_end = (
        np.array([value(one) for one in silences])
        for value in (lambda s: s.complete, lambda s: s.is_end)
    )
    ends, pauses = ([one.words for one in silences if one.is_end == end] for end in (True, False))
    return {
        "silences": len(silences),
        "ends": len(ends),
        "auc_of_complete_sentences": _rounded(auc(odds[complete], odds[~complete])),
        "auc_of_ends_of_turns": _rounded(auc(odds[is_end], odds[~is_end])),
        "share_of_ends_below": shares_below(fit, ends),
        "share_of_pauses_below": shares_below(fit, pauses),
    }


def shares_below(fit: Fit, texts: Sequence[Sequence[str]]) -> dict[str, float]:
    """The shares of texts that are less probably complete than each of _BOUNDS."""
    odds = np.array([fit.log_odds(words) for words in texts])
    return {
        f"{bound:g}": _rounded((odds < np.log(bound / (1 - bound))).mean()) for bound in _BOUNDS
    }


def requests() -> list[list[str]]:
    """The words of each turn of a user in dialogues with an agent that takes orders."""
    lines = gzip.decompress(DIALOGUES.read_bytes()).splitlines()
    turns = [turn for line in lines for turn in json.loads(line)["turns"]]
    return [words for speaker, text in turns if speaker == "user" and (words := words_of(text))]


def rounded(weights: dict[str, float]) -> dict[str, float]:
    kept = {name: round(weight, 2) for name, weight in sorted(weights.items())}
    return {name: weight for name, weight in kept.items() if weight}


def _rounded(value: float | None) -> float:
    return round(float(value or 0.0), 3)


if __name__ == "__main__":
    main()
