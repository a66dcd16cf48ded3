"""A day of many servers, from session to session.

In: arrivals, and what one server gives its users at each number of them, which the simulation of
turns has found. Out: how many users there were, how they were served, who was refused.
Turns are not simulated here: a server with n users serves a turn as well as in the table for n.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_live.errors import StageUnavailableError
from sglang_live.orchestrator.replica_choice import least_loaded

# Random numbers apart from those of the arrivals.
_STREAM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of a server's turns by its number of users; all have one entry for each point.

    first_audio_ms: quantiles, equally far from each other. continuous: share of whole responses.
    turns_per_s: of one user.
    """

    users: tuple[int, ...]
    first_audio_ms: tuple[tuple[float, ...], ...]
    continuous: tuple[float, ...]
    turns_per_s: tuple[float, ...]

    def turns(self, user_s: np.ndarray) -> np.ndarray:
        """Turns at each point. user_s: seconds of users with each number of them, from 0 on."""
        places = np.interp(np.arange(len(user_s)), self.users, np.arange(len(self.users)))
        below = np.minimum(places.astype(int), len(self.users) - 2)
        part = places - below
        spent_s = np.bincount(below, user_s * (1 - part), len(self.users))
        spent_s += np.bincount(below + 1, user_s * part, len(self.users))
        return spent_s * np.array(self.turns_per_s)

    def first_audio_quantile_ms(self, turns: np.ndarray, share: float) -> float:
        values = np.array(self.first_audio_ms)
        weights = np.broadcast_to(turns[:, None], values.shape).ravel()
        order = np.argsort(values, axis=None)
        reached = np.cumsum(weights[order])
        return float(values.ravel()[order][np.searchsorted(reached, share * reached[-1])])


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """
    most: sessions that a server admits.
    session_s: mean duration of a session, exponential.
    between_failures_s: mean time between two failures of a server's stages; inf: none fail.
    restart_s: from a failure until the stage serves again.
    """

    n_servers: int
    most: int
    session_s: float
    between_failures_s: float = float("inf")
    restart_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """
    users_mean, users_most: sessions at once. talk_h: hours of sessions.
    refused: share of arrivals. failed: share of turns, in servers with a stage that was down.
    first_audio_ms: P50, P90 and P99 of the other turns. continuous: share of their responses.
    """

    arrivals: int
    users_mean: float
    users_most: int
    talk_h: float
    refused: float
    failed: float
    first_audio_ms: tuple[float, float, float]
    continuous: float
    n_failures: int


class _Server:
    """time_s: with each number of sessions; down_s: of that, with a stage that is down."""

    def __init__(self, most: int):
        self.sessions: set[int] = set()
        self.is_healthy = True
        self.most = most
        self.time_s, self.down_s = np.zeros(most + 1), np.zeros(most + 1)
        self._since_s = 0.0

    @property
    def is_up(self) -> bool:
        """For the balancer: whether it takes a session."""
        return self.is_healthy and len(self.sessions) < self.most

    def note(self, now_s: float) -> None:
        """Count the time until now, before a change."""
        spent_s = now_s - self._since_s
        counted = self.time_s if self.is_healthy else self.down_s
        counted[len(self.sessions)] += spent_s
        self._since_s = now_s


def simulate_day(arrivals_s: np.ndarray, spec: FleetSpec, quality: Quality, seed: int) -> Day:
    rng = np.random.default_rng([seed, _STREAM])
    servers = [_Server(spec.most) for _ in range(spec.n_servers)]
    end_s = float(arrivals_s[-1])
    failures = _failures(spec, end_s, rng)
    ends: list[tuple[float, int, _Server]] = []  # of sessions, and of failures (number -1)
    durations_s = rng.exponential(spec.session_s, len(arrivals_s))
    n_refused = n_most = 0
    talk_s = 0.0
    for number, now_s in enumerate(arrivals_s.tolist()):
        while failures and failures[0][0] <= now_s:
            at_s, server_number = heapq.heappop(failures)
            _end_until(ends, at_s)
            server = servers[server_number]
            server.note(at_s)
            server.is_healthy = False
            heapq.heappush(ends, (at_s + spec.restart_s, -1 - server_number, server))
        _end_until(ends, now_s)
        try:
            server = least_loaded("server", servers)
        except StageUnavailableError:
            n_refused += 1
            continue
        server.note(now_s)
        server.sessions.add(number)
        duration_s = float(durations_s[number])
        talk_s += min(duration_s, end_s - now_s)
        heapq.heappush(ends, (now_s + duration_s, number, server))
        n_most = max(n_most, len(ends))  # with those that restart
    _end_until(ends, end_s)
    for server in servers:
        server.note(end_s)
    return _day(servers, quality, n_refused, n_most, talk_s, len(arrivals_s), end_s)


def _failures(spec: FleetSpec, end_s: float, rng: np.random.Generator) -> list[tuple[float, int]]:
    if not np.isfinite(spec.between_failures_s):
        return []
    found = []
    for number in range(spec.n_servers):
        times_s = itertools.accumulate(rng.exponential(spec.between_failures_s, 64))
        found += [(at_s, number) for at_s in times_s if at_s < end_s]
    heapq.heapify(found)
    return found


def _end_until(ends: list[tuple[float, int, _Server]], now_s: float) -> None:
    while ends and ends[0][0] <= now_s:
        at_s, number, server = heapq.heappop(ends)
        server.note(at_s)
        if number < 0:
            server.is_healthy = True
        else:
            server.sessions.discard(number)


def _day(
    servers: Sequence[_Server],
    quality: Quality,
    n_refused: int,
    n_most: int,
    talk_s: float,
    n_arrivals: int,
    end_s: float,
) -> Day:
    users = np.arange(servers[0].most + 1)
    time_s = sum(server.time_s for server in servers)
    down_s = sum(server.down_s for server in servers)
    turns = quality.turns(time_s * users)
    n_turns, n_failed = float(turns.sum()), float(quality.turns(down_s * users).sum())
    quantiles_ms = [quality.first_audio_quantile_ms(turns, share) for share in (0.5, 0.9, 0.99)]
    return Day(
        arrivals=n_arrivals,
        users_mean=float(((time_s + down_s) * users).sum() / end_s),
        users_most=n_most,
        talk_h=talk_s / 3600,
        refused=n_refused / n_arrivals,
        failed=n_failed / (n_turns + n_failed),
        first_audio_ms=(quantiles_ms[0], quantiles_ms[1], quantiles_ms[2]),
        continuous=float(turns @ np.array(quality.continuous) / n_turns),
        n_failures=sum(bool(server.down_s.any()) for server in servers),
    )
