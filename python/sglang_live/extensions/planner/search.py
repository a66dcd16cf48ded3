"""The best layout for a configuration: each is simulated, and the most users per GPU win."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.errors import BadInputError, LiveError
from sglang_live.extensions.planner.config import PlanConfig
from sglang_live.extensions.planner.layouts import HICACHE_GB, Layout, layouts
from sglang_live.extensions.planner.memory import Memory, memory_of
from sglang_live.extensions.planner.simulation.frontier import Capacity, capacity, describe
from sglang_live.extensions.planner.simulation.load.stats import PointStats
from sglang_live.extensions.planner.simulation.run import World, point_of
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.extensions.planner.simulation.users import UserSettings

# Users at the first point, and the fewest; users of a point in all its runs; width of the search.
_FIRST, _FEWEST, _SAMPLE, _CLOSE = 16, 2, 64, 0.05
_ARM = "all"
# Deviations above the mean that a Poisson number of sessions exceeds once in a thousand.
_RESERVE = 3.1

Say = Callable[[str], None]


class PlanError(LiveError):
    """No layout meets the target; the text says what is met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One server of a layout.

    found: users within the target.
    point: statistics with that many.
    bound: what bounds them: the target, or the server's process.
    """

    layout: Layout
    memory: Memory
    found: Capacity
    point: PointStats
    bound: str

    @property
    def users_per_gpu(self) -> float:
        return self.found.users / self.layout.n_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    best: of `served`, in which all layouts are that fit.
    n_servers: on the GPUs.
    """

    config: PlanConfig
    best: Served
    served: tuple[Served, ...]

    @property
    def n_servers(self) -> int:
        return self.config.n_gpus // self.best.layout.n_gpus

    @property
    def users(self) -> int:
        return self.n_servers * self.best.found.users

    @property
    def price_per_talk_hour(self) -> float | None:
        """Of one session for an hour, with as many as the GPUs serve."""
        price = self.config.price
        return None if price is None else price * self.config.n_gpus / self.users

    @property
    def users_at_peak(self) -> int | None:
        """Sessions at once that the busiest hour's arrivals exceed for a thousandth of the time."""
        per_hour = self.config.sessions_per_hour
        if per_hour is None:
            return None
        mean = per_hour * self.config.pattern.session_min / 60
        return math.ceil(mean + _RESERVE * math.sqrt(mean))

    @property
    def gpus_needed(self) -> int | None:
        peak = self.users_at_peak
        if peak is None:
            return None
        return math.ceil(peak / self.best.found.users) * self.best.layout.n_gpus


def plan(config: PlanConfig, say: Say = lambda line: None) -> Plan:
    """
    Raises:
        PlanError: no layout meets the target. BadInputError: the model does not fit.
    """
    served: list[Served] = []
    unmet: list[str] = []
    refusal = BadInputError("no layout fits")
    for layout in layouts(config.n_gpus):
        try:
            memory = memory_of(layout.placement, config.gpu.free_gib, config.sizes, config.model)
        except BadInputError as error:
            refusal = error
            continue
        say(f"simulating: {layout.name}")
        found = _serve(config, layout, memory)
        if isinstance(found, Served):
            served.append(found)
        else:
            unmet.append(found)
    if served:
        best = max(served, key=lambda one: one.users_per_gpu)
        return Plan(config=config, best=best, served=tuple(served))
    if unmet:
        raise PlanError("\n".join(["the target is not met", *unmet]))
    raise refusal


def _serve(config: PlanConfig, layout: Layout, memory: Memory) -> Served | str:
    """Returns a text if not even the fewest users are within the target."""
    points: dict[int, PointStats] = {}
    world = world_of(config, layout, memory)

    def measure(arm: str, n_users: int) -> PointStats:
        if n_users not in points:
            repeats = range(max(1, math.ceil(_SAMPLE / n_users)))
            runs = [world.simulate(arm, n_users, repeat) for repeat in repeats]
            points[n_users] = point_of(arm, n_users, runs)
        return points[n_users]

    most = config.sessions_per_server
    found = Capacity(0, None, "")
    for least in (min(_FIRST, most), min(_FEWEST, most)):
        if not found.users:
            found = capacity(measure, _ARM, least, most=most, slo=config.slo, close=_CLOSE)
    if not found.users:
        fewest = min(points, default=None)
        met = found.why if fewest is None else f"{fewest} at once, {describe(points[fewest])}"
        return f"{layout.name}: {met}"
    bound = found.why and f"with {found.fails_at}: {found.why}"
    return Served(
        layout=layout,
        memory=memory,
        found=found,
        point=measure(_ARM, found.users),
        bound=bound or "sessions of one server process (--sessions-per-server)",
    )


def world_of(config: PlanConfig, layout: Layout, memory: Memory) -> World:
    pattern = config.pattern
    spec = ServerSpec(
        model=config.model,
        placement=layout.placement,
        thinker_tokens=memory.thinker_tokens,
        talker_tokens=memory.talker_tokens,
        host_tokens=int(HICACHE_GB * 1e9 / config.model.thinker.kv_token_bytes),
        header_tokens=pattern.header_tokens,
    )
    settings = UserSettings(
        frames_per_token=pattern.frames_per_token,
        timeout_s=60.0 + 4 * pattern.response_s,
        longest=pattern.longest,
    )
    return World(pattern.workload, spec, settings)
