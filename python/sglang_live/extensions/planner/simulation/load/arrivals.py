"""Plans of all users, drawn before the run.

Draws depend on the seed, the repeat and the user's number only: every arm and every point has the
same users, so that arms differ by the server alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_live.extensions.planner.simulation.load.interruptions import (
    InterruptionModel,
    PlannedInterruption,
)
from sglang_live.policy.view import FRAME_S

# Users that all start in the same second would all stop speaking in the same second.
CLOSED_LOOP_STAGGER_S = 5.0
# Streams of random numbers: one for arrivals, and every user's second, for interruptions.
_ARRIVALS_STREAM = 2**31
_INTERRUPTIONS_STREAM = 1
_REPLIES_STREAM = 2
# Pieces of a trace: its own trend is not to become one of the load.
_PIECE_S = 10


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Responses of drawn lengths, so that arms are compared on the same work.

    durations_s: responses, measured or chosen, from which lengths are drawn.
    frames_per_token: codec frames for each token of the thinker.
    """

    durations_s: np.ndarray
    frames_per_token: float = 1.0

    def draw_tokens(self, rng: np.random.Generator) -> int:
        n_frames = float(rng.choice(self.durations_s)) / FRAME_S
        return max(1, round(n_frames / self.frames_per_token))


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Speak `clip`; after the response has been played, stay silent for `response_gap_s`.

    After a barge-in the next turn follows at once instead.
    response_tokens: requested length of the response. None: the model ends it.
    pauses_s: of a simulated user within the clip's speech: from its onset until silence, and its
        length.
    """

    clip: str
    response_gap_s: float
    interruption: PlannedInterruption | None = None
    response_tokens: int | None = None
    pauses_s: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class UserPlan:
    user: int
    start_s: float
    turns: tuple[PlannedTurn, ...]


def load_response_gaps(path: Path) -> np.ndarray:
    """Positive part of measured floor-transfer offsets, in seconds; overlaps become 0."""
    offsets_s = np.asarray(json.loads(path.read_text("utf-8"))["fto_s"], dtype=float)
    gaps_s: np.ndarray = np.maximum(offsets_s, 0.0)
    return gaps_s


def gamma_arrivals(n: int, rate_rps: float, shape: float, rng: np.random.Generator) -> list[float]:
    """Times of n arrivals: gamma-distributed spacings with mean 1 / rate_rps."""
    spacings_s = rng.gamma(shape, 1.0 / (rate_rps * shape), size=n)
    return [float(time_s) for time_s in np.cumsum(spacings_s)]


def trace_arrivals(
    second_counts: np.ndarray, length: float, rng: np.random.Generator
) -> np.ndarray:
    """Times of arrivals up to `length`, one per unit of time on average, in the bursts of a trace.

    Pieces of 10 s of it in random order, run faster or slower.

    Args:
        second_counts: arrivals of each second of the trace.
    """
    unit_s = 1 / second_counts.mean()
    n_pieces = int(length * unit_s / _PIECE_S) + 1
    first_s = rng.integers(0, len(second_counts), n_pieces)
    seconds = (first_s[:, None] + np.arange(_PIECE_S)) % len(second_counts)
    per_second = second_counts[seconds.ravel()]
    second = np.repeat(np.arange(len(per_second)), per_second)
    times: np.ndarray = np.sort(second + rng.random(len(second))) / unit_s
    return times[times < length]


def _starts_s(
    n_users: int,
    rate_rps: float,
    shape: float,
    second_counts: np.ndarray | None,
    rng: np.random.Generator,
) -> list[float]:
    if second_counts is None:
        return gamma_arrivals(n_users, rate_rps, shape, rng)
    length = 2.0 * n_users
    while True:
        found = trace_arrivals(second_counts, length, rng)[:n_users]
        if len(found) == n_users:
            return [float(time) / rate_rps for time in found]
        length *= 2


def plan_users(
    *,
    n_users: int,
    n_turns: int,
    clips: list[str],
    response_gaps_s: np.ndarray,
    seed: int,
    repeat: int,
    open_loop_rps: float | None,
    arrival_shape: float,
    second_counts: np.ndarray | None = None,
    interruptions: InterruptionModel | None = None,
    response_lengths: ResponseLengths | None = None,
) -> list[UserPlan]:
    """
    Args:
        open_loop_rps: arrivals per second; None: all users begin within a few seconds.
        arrival_shape: of gamma-distributed times between arrivals.
        second_counts: arrivals in the bursts of this trace instead.
    """
    starts_s: list[float | None] = [None] * n_users
    if open_loop_rps is not None:
        rng = np.random.default_rng([seed, repeat, _ARRIVALS_STREAM])
        starts_s = [*_starts_s(n_users, open_loop_rps, arrival_shape, second_counts, rng)]
    plans = []
    for user, start_s in enumerate(starts_s):
        rng = np.random.default_rng([seed, repeat, user])
        staggered_s = float(rng.uniform(0.0, CLOSED_LOOP_STAGGER_S))
        # A separate stream: interruptions do not change the users' other draws.
        cuts = np.random.default_rng([seed, repeat, user, _INTERRUPTIONS_STREAM])
        lengths = np.random.default_rng([seed, repeat, user, _REPLIES_STREAM])
        turns = tuple(
            PlannedTurn(
                str(rng.choice(clips)),
                float(rng.choice(response_gaps_s)),
                interruptions.draw(cuts, is_last=turn == n_turns - 1) if interruptions else None,
                response_lengths.draw_tokens(lengths) if response_lengths else None,
            )
            for turn in range(n_turns)
        )
        plans.append(UserPlan(user, staggered_s if start_s is None else start_s, turns))
    return plans
