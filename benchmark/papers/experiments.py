"""Experiments on the simulated server: loads, arms and numbers of users, and their points.

In: Experiments. Out: a document with the points of each. Everything is simulated by
benchmark.simulate, with the server's own policies.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.load.provenance import ROOT
from benchmark.simulate.__main__ import Loads
from benchmark.simulate.config import SimulateConfig
from sglang_live.simulation.load.stats import PointStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """
    Attributes:
        figure: of the paper.
        arms: policies, as benchmark.simulate names them.
        users: numbers of concurrent users.
        barge_in: shares of interrupted responses.
        settings: fields of SimulateConfig that differ from its defaults.
    """

    name: str
    figure: str
    arms: tuple[str, ...]
    users: tuple[int, ...]
    barge_in: tuple[float, ...] = (0.0,)
    settings: dict[str, Any]

    def loads(self, repeats: int, seed: int) -> dict[float, Loads]:
        config = SimulateConfig(
            policies=self.arms,
            sessions=self.users,
            barge_in=self.barge_in,
            repeats=repeats,
            seed=seed,
            **self.settings,
        )
        return {barge_in: Loads(config, barge_in) for barge_in in self.barge_in}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is kept of a point. Times from the detected end of the turn, in ms; shares from 0."""

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
    kv_tokens: int

    @classmethod
    def of(cls, point: PointStats, barge_in: float, kv_tokens: int) -> "Row":
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
            kv_tokens=kv_tokens,
        )
        rounded = {n: round(v, 4) for n, v in asdict(found).items() if isinstance(v, float)}
        return replace(found, **rounded)


def rows_of(experiment: Experiment, repeats: int, seed: int) -> list[Row]:
    return [
        Row.of(loads.point(arm, n), barge_in, loads.kv[f"{arm} {n}"]["thinker"])
        for barge_in, loads in experiment.loads(repeats, seed).items()
        for n in experiment.users
        for arm in experiment.arms
    ]


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


def write(
    name: str,
    known: dict[str, Any],
    config: SimulateConfig,
    found: list[dict[str, Any]],
    path: Path,
) -> None:
    """known: the facts of provenance, as of the beginning."""
    device = f"simulated: {config.server.model.name}"
    settings = {"repeats": config.repeats, "seed": config.seed}
    document = {
        "benchmark": name,
        **known,
        "device": device,
        "config": settings,
        "experiments": found,
    }
    text = json.dumps(document, indent=1, default=_plain)
    path.write_text(text + "\n")
    print(f"wrote {path}", file=sys.stderr)


def to_json(experiment: Experiment, rows: list[Row]) -> dict[str, Any]:
    return {**asdict(experiment), "rows": [asdict(row) for row in rows]}


def _plain(value: Any) -> str:
    return str(value).removeprefix(f"{ROOT}/")


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f} ms"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"
