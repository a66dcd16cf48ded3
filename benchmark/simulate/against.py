"""Comparison with the engine: a document of voice_load on a modelled device, simulated again.

The same users, arms and flags of the server. Twice: with the device's costs alone, and with the
time in which the small model computed beneath it, as the document says, in each stage's thread. The
engine's numbers contain that time; the device would not take it.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from benchmark.simulate.config import H100
from benchmark.simulate.server_args import server_of
from sglang_live.extensions.planner.device_model.model import load_device_model
from sglang_live.extensions.planner.simulation.load.stats import PointStats
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.run import World, point_of
from sglang_live.extensions.planner.simulation.spec import HostTimes, ServerSpec
from sglang_live.extensions.planner.simulation.users import UserSettings
from sglang_live.extensions.planner.simulation.workload import Workload

GOAL = 0.1
# Differences below these are not disagreements, whatever their ratio.
_SMALL = {"ms": 20.0, "share": 0.01, "rtf": 0.02, "per_s": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measure of one arm at one point. beneath: with the small model's time; None: not known.

    late: results noticed late, as a share of the modelled time, in the engine's document.
    """

    policies: str
    sessions: int
    measure: str
    engine: float
    simulated: float
    beneath: float | None
    late: float

    @property
    def agrees(self) -> bool:
        small = next(value for unit, value in _SMALL.items() if self.measure.endswith(unit))
        difference = abs(self.simulated - self.engine)
        return difference <= max(small, GOAL * abs(self.engine))


def compare(document: dict[str, Any]) -> list[Compared]:
    """
    Raises:
        ValueError: the document cannot be simulated; says why.
    """
    workload, server = _workload_of(document), _server_of(document)
    repeats, storm = document["config"]["repeats"], document["config"].get("storm")
    storm = None if storm is None else StormSpec(**storm)
    found = []
    runs_of: dict[tuple[str, int], list[dict]] = defaultdict(list)
    for run in document["runs"]:
        runs_of[run["policies"], run["sessions"]].append(run)
    for point in document["points"]:
        arm, n_users = point["policies"], point["sessions"]
        engine_runs = runs_of[arm, n_users]
        ideal = _point(World(workload, server, UserSettings(), storm), arm, n_users, repeats)
        slower = World(workload, _with_model_beneath(server, engine_runs), UserSettings(), storm)
        beneath = _point(slower, arm, n_users, repeats)
        late = _late(engine_runs)
        engine = measures(point) | {"ttfp_after_end_mean_ms": _mean_ms(_records(engine_runs))}
        for measure, value in engine.items():
            simulated = ideal[measure]
            if value is None or simulated is None:
                continue
            found.append(
                Compared(
                    policies=arm,
                    sessions=n_users,
                    measure=measure,
                    engine=value,
                    simulated=simulated,
                    beneath=beneath[measure],
                    late=late,
                )
            )
    return found


def measures(point: dict[str, Any]) -> dict[str, float | None]:
    """The measures of a document's point, by name with their unit."""
    return {
        "ttfp_p50_ms": point["ttfp_ms"]["p50"],
        "ttfp_p90_ms": point["ttfp_ms"]["p90"],
        "ttfp_after_end_p50_ms": point["ttfp_after_detection_ms"]["p50"],
        "ttfp_after_end_p90_ms": point["ttfp_after_detection_ms"]["p90"],
        "p50_rtf": point["rtf"]["p50"],
        "continuous_share": point["continuity"],
        "waste_share": point["waste"],
        "turns_per_s": point["turns_per_s"],
    }


def measures_of(point: PointStats) -> dict[str, float | None]:
    ttfp, own = point.ttfp_ms, point.ttfp_after_detection_ms
    return {
        "ttfp_p50_ms": ttfp.p50,
        "ttfp_p90_ms": ttfp.p90,
        "ttfp_after_end_p50_ms": own.p50,
        "ttfp_after_end_p90_ms": own.p90,
        "p50_rtf": point.rtf.p50,
        "continuous_share": point.continuity,
        "waste_share": point.waste,
        "turns_per_s": point.turns_per_s,
    }


def table(found: list[Compared]) -> str:
    columns = "{:>24} {:>4}  {:24} {:>9} {:>9} {:>7}  {:>9} {:>7}  {}"
    lines = [
        columns.format(
            "arm", "n", "measure", "engine", "simulated", "ratio", "beneath", "ratio", "within 10 %"
        )
    ]
    for one in found:
        lines.append(
            columns.format(
                one.policies,
                one.sessions,
                one.measure,
                _number(one.engine),
                _number(one.simulated),
                _ratio(one.simulated, one.engine),
                _number(one.beneath),
                _ratio(one.beneath, one.engine),
                "yes" if one.agrees else "no",
            )
        )
    late = {(one.policies, one.sessions): one.late for one in found}
    lines += [
        f"{arm} at {n} users: the engine's results were late by {100 * share:.0f} % of the "
        "modelled time, in the stage with the largest share"
        for (arm, n), share in late.items()
    ]
    return "\n".join(lines)


def _point(world: World, arm: str, n_users: int, repeats: int) -> dict[str, float | None]:
    runs = [world.simulate(arm, n_users, repeat) for repeat in range(repeats)]
    rows = [row.record.to_json() for run in runs for row in run.rows]
    return measures_of(point_of(arm, n_users, runs)) | {"ttfp_after_end_mean_ms": _mean_ms(rows)}


def _records(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [turn for run in runs for turn in run["turns"]]


def _mean_ms(records: list[dict[str, Any]]) -> float | None:
    """Mean time from the detected end of the turn to the first audio: also of few turns."""
    known = [one for one in records if one["ttfp_ms"] is not None and one["end_of_turn_ms"]]
    if not known:
        return None
    return sum(one["ttfp_ms"] - one["end_of_turn_ms"] for one in known) / len(known)


def _workload_of(document: dict[str, Any]) -> Workload:
    config = document["config"]
    if not document.get("device_model") or not config.get("drawn_replies"):
        raise ValueError("only loads with --device-model and --drawn-replies can be simulated")
    if config.get("open_loop_rps") or config.get("false_triggers"):
        raise ValueError("open loops and false triggers are not simulated")
    if config.get("history_words"):
        raise ValueError("sessions that begin with a history are not simulated")
    return Workload.load(turns=config["turns"], barge_in=config["barge_in"], seed=config["seed"])


def _server_of(document: dict[str, Any]) -> ServerSpec:
    path = H100.with_name(document["config"]["device_model"].split("/")[-1])
    model = load_device_model(path)
    if model.digest != document["device_model"]["file_sha256"]:
        raise ValueError(f"{path.name} has changed since the document was written")
    divisor = document.get("clock_divisor", 1)
    return server_of(model, HostTimes().divided(divisor), document["config"]["server_args"])


def _with_model_beneath(server: ServerSpec, runs: list[dict[str, Any]]) -> ServerSpec:
    """Each stage's thread computes for each batch as long as the engine's did on average."""
    own = {
        f"{stage}_round_s": sum(run["device"][stage]["computed_s"] for run in runs)
        / max(1.0, sum(run["device"][stage]["batches"] for run in runs))
        for stage in runs[0]["device"]
    }
    return replace(server, host=replace(server.host, **own))


def _late(runs: list[dict[str, Any]]) -> float:
    stages = {stage for run in runs for stage in run["device"]}
    shares = [
        sum(run["device"][stage]["late_s"] for run in runs)
        / max(1e-9, sum(run["device"][stage]["modelled_s"] for run in runs))
        for stage in stages
    ]
    return max(shares, default=0.0)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


def _ratio(one: float | None, other: float) -> str:
    return "n/a" if one is None or not other else f"{one / other:.2f}"
