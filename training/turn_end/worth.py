"""What the evidence is worth: how well it tells ends from pauses, whether more recordings would
help, the bound of every wait that depends on the score alone, and whether the score tells of an end
before it comes.

    python -m training.turn_end.worth --json out.json
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, combinations_with_replacement
from pathlib import Path

import numpy as np

from benchmark.load.provenance import facts
from benchmark.turn_taking.__main__ import RECORDINGS
from benchmark.turn_taking.layouts import read_clip_folders
from benchmark.turn_taking.scoring import auc
from benchmark.turn_taking.timeline import SAMPLES_PER_MS, Recording
from sglang_live.interaction.endpoint import EndpointModel, SmartTurnModel, installed_model_path
from sglang_live.interaction.silero import SileroModel
from sglang_live.interaction.turn_end import TurnEndWeights, score_evidence, trained_weights
from sglang_live.models.moonshine import MoonshineRecogniser
from sglang_live.models.packages import MOONSHINE, fetch
from training.turn_end.__main__ import CALLS, DRAWS
from training.turn_end.fit import figures, fitted, held_back, waits
from training.turn_end.pauses import (
    CUT_CLIPS,
    LATE_MS,
    JudgedPause,
    judged_pauses,
    read_pauses,
)

Judged = Sequence[tuple[JudgedPause, TurnEndWeights]]
Waited = Sequence[tuple[JudgedPause, float]]

_N_BOOTSTRAPS = 500
_COSTS_MS = np.geomspace(100, 30_000, 60)
_SILENCES_MS = (250, 300, 400, 500, 600, 700, 850, 1000, 1200, 1500, 1800, 2200, 2600, 3000)
_N_SCORES = 12
# Where speech is scored before its end: not in pauses, and not at the beginning of the turn.
_LEAST_VOICE_MS, _STEP_MS, _SOON_MS = 600.0, 200.0, 400.0
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = installed_model_path()
    assert path is not None, "there is no endpoint model: install pipecat-ai"
    speech, model = SileroModel(), SmartTurnModel(path)
    recogniser = MoonshineRecogniser.load(fetch(MOONSHINE))
    recordings = {
        split: read_clip_folders([RECORDINGS], split, DRAWS)[0] for split in ("tune", "held_out")
    }
    of = {
        split: judged_pauses(recordings[split], speech, model, DRAWS, recogniser)
        for split in recordings
    }
    seen, unseen = [*of["tune"], *read_pauses(CALLS)], of["held_out"]
    document = {
        "benchmark": "turn_end_worth",
        **facts(),
        "auc": {"fitted to": _aucs(seen), "held_out": _aucs(unseen)},
        "learning": _learning(seen),
        "bound_on_held_out": bound(unseen),
        "before_the_end": {split: before_the_end(recordings[split], model) for split in recordings},
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if args.json:
        args.json.write_text(text, "utf-8")


def _aucs(pauses: Sequence[JudgedPause]) -> dict:
    """Of each piece of evidence in each kind of recording. The model uses the score alone.

    The scores after LATE_MS, and before, are also compared in the silences that last as long.
    """
    pieces = {
        "score": {id(p): p.score for p in pauses},
        "fade": {id(p): -p.fade_db for p in pauses},
        "duration": {id(p): p.turn_ms for p in pauses},
    }
    heard = [pause for pause in pauses if pause.words is not None]
    sources = ["all", *sorted({pause.source for pause in pauses})]
    own = {source: [p for p in pauses if source in ("all", p.source)] for source in sources}
    found = {
        name: {source: auc_between(own[source], values) for source in sources}
        for name, values in pieces.items()
    }
    found["words"] = {
        "all": auc_between(heard, {id(p): p.words for p in heard if p.words is not None})
    }
    found["score and words"] = {
        "all": auc_between(heard, {id(p): _log_odds(p) for p in heard}),
        "score alone": auc_between(heard, {id(p): score_evidence(p.score) for p in heard}),
    }
    long = [pause for pause in pauses if pause.late_score is not None]
    for name in ("score", "late_score"):
        values = {id(pause): getattr(pause, name) for pause in long}
        found[f"{name} of silences of {LATE_MS} ms"] = {"all": auc_between(long, values)}
    return found


def _log_odds(pause: JudgedPause) -> float:
    return trained_weights().log_odds(pause.score) + (pause.words or 0.0)


def before_the_end(recordings: Sequence[Recording], model: EndpointModel) -> dict:
    """The endpoint model's score in the midst of speech, as far as the end of the turn is from it.

    A response that begins before the last word needs to know that it is the last one.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    for recording in recordings:
        if recording.group in CUT_CLIPS:
            continue
        for turn in (turn for turn in recording.turns if turn.ends):
            for at_ms in np.arange(turn.start_ms + _LEAST_VOICE_MS, turn.end_ms, _STEP_MS):
                if any(p.start_ms - _STEP_MS < at_ms < p.end_ms + _STEP_MS for p in turn.pauses):
                    continue
                left_ms = turn.end_ms - at_ms
                first, last = (round(ms * SAMPLES_PER_MS) for ms in (turn.start_ms, at_ms))
                score = model.completeness(recording.pcm[max(0, first) : last])
                scores["soon" if left_ms <= _SOON_MS else "later"].append(score)
    soon, later = np.array(scores["soon"]), np.array(scores["later"])
    rows = {}
    for least in (0.5, 0.9, 0.98):
        n_right, n_wrong = int((soon >= least).sum()), int((later >= least).sum())
        rows[f"{least:g}"] = {"right": n_right, "wrong": n_wrong}
    return {
        "within_ms": _SOON_MS,
        "soon": len(soon),
        "later": len(later),
        "auc": round(auc(soon, later) or 0.0, 3),
        "begun_at_a_score_of": rows,
    }


def auc_between(pauses: Sequence[JudgedPause], values: dict[int, float]) -> dict:
    """Of ends over pauses, with the interval of a bootstrap over pauses."""
    rng, drawn = np.random.default_rng(0), []
    ends, within = (
        np.array([values[id(p)] for p in pauses if p.is_end == end]) for end in (True, False)
    )
    for _ in range(_N_BOOTSTRAPS):
        drawn.append(auc(rng.choice(ends, len(ends)), rng.choice(within, len(within))))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {
        "ends": len(ends),
        "pauses": len(within),
        "auc": round(auc(ends, within) or 0.0, 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
    }


def _learning(pauses: Sequence[JudgedPause]) -> dict:
    """Mean delay at shares of false cut-offs, of fits to some of the other groups."""
    rng = np.random.default_rng(0)
    groups = sorted({pause.group for pause in pauses})
    silent = [[(pause, float(ms)) for pause in pauses] for ms in range(250, 3001, 50)]
    found = {"silence": mean_delays(silent)}
    for n in (2, 4, 6, 8):
        runs = [_with_groups(pauses, groups, n, rng) for _ in range(5)]
        found[f"{n} groups"] = {
            share: round(float(np.mean([run[share] for run in runs]))) for share in runs[0]
        }
    found[f"{len(groups) - 1} groups"] = _delays_of(held_back(pauses))
    return found


def _with_groups(
    pauses: Sequence[JudgedPause], groups: Sequence[str], n: int, rng: np.random.Generator
) -> dict[str, int]:
    judged: list[tuple[JudgedPause, TurnEndWeights]] = []
    for group in groups:
        others = rng.choice([g for g in groups if g != group], n, replace=False)
        own = [pause for pause in pauses if pause.group in others]
        if len({pause.is_end for pause in own}) == 2:
            weights = fitted(own, {})
            judged += [(pause, weights) for pause in pauses if pause.group == group]
    return _delays_of(judged)


def _delays_of(judged: Judged) -> dict[str, int]:
    return mean_delays([waits(judged, cost) for cost in _COSTS_MS])


def mean_delays(settings: Iterable[Waited]) -> dict[str, int]:
    """At each of SHARES of false cut-offs, between the settings around it."""
    points = sorted((f["false_cutoffs"], f["delay_mean_ms"]) for f in map(figures, settings))
    shares, delays = zip(*points, strict=True)
    return {f"{share:g}": round(float(np.interp(share, shares, delays))) for share in SHARES}


def bound(pauses: Sequence[JudgedPause]) -> dict:
    """The least delays of waits with up to three levels by the score, chosen on these pauses.

    Any rule of the score that waits less for a higher one has about these levels; so no fit of
    such a rule can be better here than what is found with the answers known.
    """
    scores = np.array([p.score for p in pauses])
    lasts = np.array([p.lasts_ms for p in pauses])
    is_end = np.array([p.is_end for p in pauses])
    weight = np.array([p.weight for p in pauses])
    edges = np.unique(np.quantile(scores, np.linspace(0, 1, _N_SCORES + 1)[1:-1]))
    best = {share: {"delay_p50_ms": 3000.0, "delay_p90_ms": 3000.0} for share in SHARES}
    for low, high in combinations(edges, 2):
        level = (scores <= low) * 1 + (scores <= high) * 1
        for levels in combinations_with_replacement(_SILENCES_MS, 3):
            waits_ms = np.array(levels)[level]
            cut = np.average(lasts[~is_end] > waits_ms[~is_end], weights=weight[~is_end])
            delays = np.sort(waits_ms[is_end])
            p50, p90 = (float(delays[round(q * (len(delays) - 1))]) for q in (0.5, 0.9))
            for share, own in best.items():
                if cut <= share:
                    own["delay_p50_ms"] = min(own["delay_p50_ms"], p50)
                    own["delay_p90_ms"] = min(own["delay_p90_ms"], p90)
    return {f"{share:g}": own for share, own in best.items()}


if __name__ == "__main__":
    main()
