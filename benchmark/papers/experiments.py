"""Experiments on the simulated server: loads, arms and numbers of users, and their points.

In: Experiments. Out: the points of each. Everything is simulated by benchmark.simulate, with the
server's own policies.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmark.papers.pool_use import PoolUse, PoolWatch, pool_use
from benchmark.simulate.config import SimulateConfig
from sglang_live.extensions.planner.simulation.load.stats import PointStats
from sglang_live.extensions.planner.simulation.load.timeline import Span, spans
from sglang_live.extensions.planner.simulation.run import Simulated, World, point_of

# A device for each stage, whose memory the stage has to itself.
APART: dict[str, Any] = {
    **{"turns": 4, "devices": 3},
    **{"thinker_tokens": 400_000, "talker_tokens": 1_000_000},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """
    Attributes:
        figure: of the paper.
        arms: policies, as benchmark.simulate names them.
        users: numbers of concurrent users; of all arrivals, if settings have arrive_s.
        barge_in: shares of interrupted responses.
        settings: fields of SimulateConfig that differ from its defaults.
        n_servers: side by side; each user gets one of them by chance.
        span_s: of the spans of time in which turns are counted; 0: they are not.
        watch_s: for which the thinker's pool is watched, in spans; 0: it is not.
    """

    name: str
    figure: str
    arms: tuple[str, ...]
    users: tuple[int, ...]
    barge_in: tuple[float, ...] = (0.0,)
    settings: dict[str, Any]
    n_servers: int = 1
    span_s: float = 0.0
    watch_s: float = 0.0

    def config(self, repeats: int, seed: int) -> SimulateConfig:
        return SimulateConfig(
            policies=self.arms,
            sessions=self.users,
            barge_in=self.barge_in,
            repeats=repeats,
            seed=seed,
            **self.settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is kept of a point. Times from the detected end of the turn, in ms; shares from 0.

    users: as in the experiment. arrivals_per_s: of them; None: all begin within a few seconds.
    failed: turns, refused ones among them. sessions_left: that never ended.
    most_sessions: at once, in one run. kv_tokens: most that the thinker held. None: several
        servers.
    over_time, pool: turns of all seeds by time, and the thinker's pool, if the experiment asks.
    """

    arm: str
    users: int
    barge_in: float
    first_audio_p50_ms: float | None
    first_audio_p90_ms: float | None
    first_audio_p95_ms: float | None
    rtf_p50: float | None
    rtf_p90: float | None
    continuity: float | None
    viability: float | None
    waste: float | None
    turns_per_s: float
    useful_turns_per_s: float
    completed: int
    failed: int
    kv_tokens: int | None
    arrivals_per_s: float | None = None
    refused: int = 0
    most_sessions: int | None = None
    sessions_left: int = 0
    over_time: tuple[Span, ...] = ()
    pool: PoolUse | None = None

    @classmethod
    def of(cls, point: PointStats, barge_in: float, **others: Any) -> "Row":
        wait, rtf = point.ttfp_after_detection_ms, point.rtf
        found = cls(
            arm=point.policies,
            users=point.sessions,
            barge_in=barge_in,
            first_audio_p50_ms=wait.p50,
            first_audio_p90_ms=wait.p90,
            first_audio_p95_ms=wait.p95,
            rtf_p50=rtf.p50,
            rtf_p90=rtf.p90,
            continuity=point.continuity,
            viability=point.viability,
            waste=point.waste,
            turns_per_s=point.turns_per_s,
            useful_turns_per_s=point.useful_turns_per_s,
            completed=point.completed,
            failed=point.failed,
            refused=point.refused,
            **others,
        )
        rounded = {n: round(v, 4) for n, v in asdict(found).items() if isinstance(v, float)}
        return replace(found, **rounded)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Row":
        over_time = tuple(Span(**one) for one in found.get("over_time", ()))
        pool = found.get("pool")
        used = None if pool is None else PoolUse.from_json(pool)
        return cls(**{**found, "over_time": over_time, "pool": used})


class Servers:
    """Servers side by side, each with users of its own, whose number is drawn."""

    def __init__(self, experiment: Experiment, config: SimulateConfig, barge_in: float):
        self._world = World(config.workload(barge_in), config.server, config.users)
        self._experiment, self._config, self._barge_in = experiment, config, barge_in

    def row(self, arm: str, n_users: int) -> Row:
        runs, watches = self._runs(arm, n_users)
        point = point_of(arm, n_users, runs)
        # The point is of runs one after the other, but those of a repeat are side by side.
        beside = len(runs) / self._config.repeats
        point = replace(
            point,
            turns_per_s=point.turns_per_s * beside,
            useful_turns_per_s=point.useful_turns_per_s * beside,
        )
        is_alone = self._experiment.n_servers == 1
        arrive_s, span_s = self._config.arrive_s, self._experiment.span_s
        pool = None
        if watches:
            pool = pool_use(watches, [run.end_s for run in runs], point.completed, span_s)
        return Row.of(
            point,
            self._barge_in,
            kv_tokens=runs[-1].most_used["thinker"] if is_alone else None,
            arrivals_per_s=n_users / arrive_s if arrive_s else None,
            most_sessions=max(run.most_sessions for run in runs) if is_alone else None,
            sessions_left=sum(run.sessions_left for run in runs),
            over_time=_over_time(runs, span_s) if span_s else (),
            pool=pool,
        )

    def _runs(self, arm: str, n_users: int) -> tuple[list[Simulated], list[PoolWatch]]:
        """Returns the runs, and what watched the pool of each, if one does."""
        runs, watches, n_servers = [], [], self._experiment.n_servers
        for repeat in range(self._config.repeats):
            rng = np.random.default_rng((self._config.seed, repeat, n_users))
            for server, n in enumerate(np.bincount(rng.integers(0, n_servers, n_users))):
                if not n:
                    continue
                watch = PoolWatch(self._experiment.watch_s)
                # A repeat of its own: the users of every server are other ones.
                number = repeat * n_servers + server
                runs.append(self._world.simulate(arm, int(n), number, watch.begin))
                watches.append(watch)
        return runs, watches if self._experiment.watch_s else []


def rows_of(experiment: Experiment, repeats: int, seed: int) -> list[Row]:
    config = experiment.config(repeats, seed)
    rows = []
    for barge_in in experiment.barge_in:
        servers = Servers(experiment, config, barge_in)
        rows += [servers.row(arm, n) for n in experiment.users for arm in experiment.arms]
    return rows


def _over_time(runs: Iterable[Simulated], span_s: float) -> tuple[Span, ...]:
    found = spans([row for run in runs for row in run.rows], span_s)
    return tuple(
        replace(one, continuity=None if one.continuity is None else round(one.continuity, 4))
        for one in found
    )


def show(experiment: Experiment, rows: Iterable[Row]) -> None:
    print(f"\n{experiment.name} ({experiment.figure})")
    for row in rows:
        print(
            f"{row.users:5d} users  interruptions {row.barge_in:g}  {row.arm:40}"
            f"  first audio P50 / P90 {_ms(row.first_audio_p50_ms)} / {_ms(row.first_audio_p90_ms)}"
            f"  continuous {_share(row.continuity)}  waste {_share(row.waste)}"
            f"  {row.turns_per_s:.2f} turns/s",
            flush=True,
        )


def to_json(experiment: Experiment, rows: list[Row]) -> dict[str, Any]:
    return {**asdict(experiment), "rows": [asdict(row) for row in rows]}


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f} ms"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"
