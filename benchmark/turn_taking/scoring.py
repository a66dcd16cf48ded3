"""Figures of decisions against annotations. Pure: no audio, no model, no files."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmark.turn_taking.timeline import Decision, Span, Turn

# A decision belongs to a pause until this long after it: two windows of the voice detector, which
# cannot know before that the voice is back.
LATE_MS = 64.0
# Of a word's end the annotation is not more exact than this.
EARLY_MS = 50.0


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """
    pauses, cut_pauses: silences within the turn, and those that were taken for its end.
    cut_words: the turn was taken for ended outside of a pause.
    delay_ms: from the end of the last word to the decision; None: none came, or the end is unknown.
    """

    pauses: int
    cut_pauses: int
    cut_words: int
    ends: bool
    delay_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFigures:
    """
    false_cutoffs: share of the pauses that were taken for the end of the turn.
    missed: ends that were not noticed before the next turn.
    """

    turns: int
    pauses: int
    cut_pauses: int
    cut_words: int
    missed: int
    false_cutoffs: float | None
    delay_p50_ms: float | None
    delay_p90_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionFigures:
    """
    stops, early_stops: stimuli at which the agent stopped; those where it did so before the onset.
    holds: stimuli at which its audio was kept back without a stop.
    longest_hold_ms: of those.
    reaction_*_ms: from the onset to the stop.
    """

    n: int
    stops: int
    early_stops: int
    holds: int
    stopped: float | None
    stopped_low: float
    stopped_high: float
    reaction_p50_ms: float | None
    reaction_p90_ms: float | None
    reaction_p95_ms: float | None
    longest_hold_ms: float | None


def turn_outcome(turn: Turn, decisions: Sequence[Decision]) -> TurnOutcome:
    """Outcome of one turn. decisions: of the whole recording, ascending."""
    ended_ms = [d.at_ms for d in decisions if d.kind == "ended"]
    mine_ms = [at for at in ended_ms if turn.start_ms <= at < turn.until_ms]
    after_ms = [at for at in mine_ms if at >= turn.end_ms - EARLY_MS]
    cut: set[Span] = set()
    cut_words = 0
    for at in mine_ms:
        if at < turn.end_ms - EARLY_MS:
            span = _pause_at(turn, at)
            cut_words += span is None
            cut |= set() if span is None else {span}
    delay_ms = max(0.0, after_ms[0] - turn.end_ms) if turn.ends and after_ms else None
    return TurnOutcome(len(turn.pauses), len(cut), cut_words, turn.ends, delay_ms)


def _pause_at(turn: Turn, at_ms: float) -> Span | None:
    for pause in turn.pauses:
        if pause.start_ms <= at_ms < pause.end_ms + LATE_MS:
            return pause
    return None


def end_figures(outcomes: Iterable[TurnOutcome]) -> EndFigures:
    outcomes = list(outcomes)
    ends = [outcome for outcome in outcomes if outcome.ends]
    delays_ms = [outcome.delay_ms for outcome in ends if outcome.delay_ms is not None]
    pauses = sum(outcome.pauses for outcome in outcomes)
    cut_pauses = sum(outcome.cut_pauses for outcome in outcomes)
    return EndFigures(
        turns=len(ends),
        pauses=pauses,
        cut_pauses=cut_pauses,
        cut_words=sum(outcome.cut_words for outcome in outcomes),
        missed=len(ends) - len(delays_ms),
        false_cutoffs=cut_pauses / pauses if pauses else None,
        delay_p50_ms=_percentile(delays_ms, 50),
        delay_p90_ms=_percentile(delays_ms, 90),
    )


def delay_at(curve: Iterable[tuple[float, float]], false_cutoffs: float) -> float | None:
    """The least delay at a share of false cut-offs, by interpolation.

    Args:
        curve: (share of false cut-offs, delay in ms) of each setting, in any order.
    Returns:
        On the line between the two best settings around the share. Beyond the last setting its
        delay. None if every setting cuts off more.
    """
    best = _frontier(curve)
    below = [point for point in best if point[0] <= false_cutoffs]
    above = [point for point in best if point[0] > false_cutoffs]
    if not below:
        return None
    (x0, y0) = below[-1]
    if not above:
        return y0
    (x1, y1) = above[0]
    return y0 + (y1 - y0) * (false_cutoffs - x0) / (x1 - x0)


def _frontier(curve: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The settings that no other one surpasses in both figures, by ascending share."""
    best: list[tuple[float, float]] = []
    for point in sorted(curve):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def interruption_figures(
    heard: Iterable[tuple[float, Sequence[Decision]]],
) -> InterruptionFigures:
    """Figures of stimuli of one kind. heard: onset in ms, and the decisions."""
    n = stops = early = holds = 0
    reactions_ms: list[float] = []
    holds_ms: list[float] = []
    for onset_ms, decisions in heard:
        n += 1
        stopped_ms = [d.at_ms for d in decisions if d.kind == "stopped"]
        if not stopped_ms:
            holds += any(d.kind == "held" for d in decisions)
            holds_ms += _holds_ms(decisions)
            continue
        stops += 1
        if stopped_ms[0] < onset_ms:
            early += 1
        else:
            reactions_ms.append(stopped_ms[0] - onset_ms)
    low, high = wilson(stops, n)
    return InterruptionFigures(
        n=n,
        stops=stops,
        early_stops=early,
        holds=holds,
        stopped=stops / n if n else None,
        stopped_low=low,
        stopped_high=high,
        reaction_p50_ms=_percentile(reactions_ms, 50),
        reaction_p90_ms=_percentile(reactions_ms, 90),
        reaction_p95_ms=_percentile(reactions_ms, 95),
        longest_hold_ms=max(holds_ms, default=None),
    )


def _holds_ms(decisions: Sequence[Decision]) -> list[float]:
    return [
        after.at_ms - before.at_ms
        for before, after in pairwise(decisions)
        if (before.kind, after.kind) == ("held", "released")
    ]


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a share k of n (Wilson, 95 %); 0 to 1 without a sample."""
    if not n:
        return 0.0, 1.0
    share, spread = k / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float | None:
    """Probability that a positive has the higher value; ties count half."""
    if not len(positives) or not len(negatives):
        return None
    difference = np.subtract.outer(np.asarray(positives), np.asarray(negatives))
    return float((np.sign(difference).mean() + 1) / 2)


def _percentile(values: Sequence[float], p: float) -> float | None:
    return float(np.percentile(values, p)) if values else None
