"""From turns to the numbers of a point. Pure: rows in, statistics out."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sglang_live.client.turn_record import TurnRecord

# First audio within this of the detected end of the turn counts as useful; LiveServe's SLO.
TTFP_SLO_MS = 500.0
CONTINUITY_SLO = 0.99
# Below this a median says little and a higher percentile nothing.
MIN_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of a sample; one is None where the sample is too small to know it."""

    n: int
    p50: float | None
    p90: float | None
    p95: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution":
        known = [value for value in values if value is not None]
        return cls(len(known), *(percentile(known, p) for p in (50, 90, 95)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStats:
    """One arm at one point, all repeats together.

    Attributes:
        completed, failed: turns; a failed turn has no times but counts against the SLO.
        continuity: share of completed turns without a gap over 100 ms; None without turns.
        useful_turns_per_s: completed, continuous, first audio within the SLO after detection.
        within_slo: both SLOs hold for the point; None if there are too few turns to say.
        cpu_s_per_audio_s: server CPU time per second of reply audio.
    """

    policies: str
    sessions: int
    runs: int
    completed: int
    failed: int
    early_replies: int
    ttfp_ms: Distribution
    end_of_turn_ms: Distribution
    ttfp_after_detection_ms: Distribution
    rtf: Distribution
    continuity: float | None
    turns_per_s: float
    useful_turns_per_s: float
    within_slo: bool | None
    cpu_s_per_audio_s: float | None
    peak_rss_mib: float
    late_frames: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What of a run is not about single turns."""

    wall_s: float
    cpu_s: float
    peak_rss_mib: float
    late_frames: float


def percentile(values: list[float], p: float) -> float | None:
    """Linear interpolation between ranks; None unless a value may be expected beyond it.

    P50 needs 5 values, P90 needs 10, P95 needs 20.
    """
    if len(values) < max(MIN_SAMPLES, math.ceil(100 / (100 - p) - 1e-9)):
        return None
    return float(np.percentile(values, p))


def is_useful(record: TurnRecord) -> bool:
    if not record.ok or record.gaps_over_100ms or record.ttfp_ms is None:
        return False
    after_detection_ms = record.ttfp_after_detection_ms
    waited_ms = record.ttfp_ms if after_detection_ms is None else after_detection_ms
    return waited_ms <= TTFP_SLO_MS


def point_stats(
    policies: str, sessions: int, records: list[TurnRecord], runs: list[RunTotals]
) -> PointStats:
    completed = [record for record in records if record.ok]
    wall_s = sum(run.wall_s for run in runs)
    audio_s = sum(record.audio_s for record in records)
    continuity = None
    if completed:
        continuity = sum(not r.gaps_over_100ms for r in completed) / len(completed)
    after_detection = Distribution.of(r.ttfp_after_detection_ms for r in completed)
    return PointStats(
        policies=policies,
        sessions=sessions,
        runs=len(runs),
        completed=len(completed),
        failed=len(records) - len(completed),
        early_replies=sum(r.early_replies for r in records),
        ttfp_ms=Distribution.of(r.ttfp_ms for r in completed),
        end_of_turn_ms=Distribution.of(r.end_of_turn_ms for r in completed),
        ttfp_after_detection_ms=after_detection,
        rtf=Distribution.of(r.rtf for r in completed),
        continuity=continuity,
        turns_per_s=_rate(len(completed), wall_s),
        useful_turns_per_s=_rate(sum(map(is_useful, records)), wall_s),
        within_slo=_within_slo(after_detection.p90, continuity, len(records) - len(completed)),
        cpu_s_per_audio_s=sum(run.cpu_s for run in runs) / audio_s if audio_s else None,
        peak_rss_mib=max((run.peak_rss_mib for run in runs), default=0.0),
        late_frames=max((run.late_frames for run in runs), default=0.0),
    )


def capacity(points: list[PointStats]) -> int | None:
    """Largest number of sessions that one arm served within the SLOs; None: none of them."""
    return max((point.sessions for point in points if point.within_slo), default=None)


def useful_rps(points: list[PointStats]) -> float | None:
    """LiveServe's: the highest rate of turns at a point that meets the continuity SLO."""
    smooth = [p for p in points if p.continuity is not None and p.continuity >= CONTINUITY_SLO]
    return max((point.turns_per_s for point in smooth if not point.failed), default=None)


def _within_slo(p90_ms: float | None, continuity: float | None, failed: int) -> bool | None:
    if failed:
        return False
    if p90_ms is None or continuity is None:
        return None
    return p90_ms <= TTFP_SLO_MS and continuity >= CONTINUITY_SLO


def _rate(n: int, wall_s: float) -> float:
    return n / wall_s if wall_s > 0 else 0.0
