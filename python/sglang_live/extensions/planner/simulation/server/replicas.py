"""The stage replicas of a simulated server, as the supervisor's list has them.

Owner: one Replicas per server. A replica that dies serves again as another process: nothing of what
it held is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from sglang_live.bridge.rounds import rounds_of
from sglang_live.extensions.planner.simulation.engine.engine import Consumer, Engine
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.engine.tiers import Tiers
from sglang_live.extensions.planner.simulation.engine.vocoder import Vocoder
from sglang_live.extensions.planner.simulation.events import ArbitratedDevice, Device, Events
from sglang_live.extensions.planner.simulation.server.link import Hops, SimulatedStage, StageLink
from sglang_live.extensions.planner.simulation.server.talker import SimulatedTalker
from sglang_live.extensions.planner.simulation.server.thinker import SimulatedThinker
from sglang_live.extensions.planner.simulation.server.thinker_session import ThinkerKv
from sglang_live.extensions.planner.simulation.server.turn_spec import TurnSpec
from sglang_live.extensions.planner.simulation.server.vocoder import SimulatedVocoder
from sglang_live.extensions.planner.simulation.sharing import SharedDevice
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.messages import Ready
from sglang_live.policy.arbiter import lead_s
from sglang_live.policy.policies import Policies
from sglang_live.stage_specs import MIN_REQUEST_ROWS, SPARE_REQUEST_ROWS
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Replica
from sglang_live.stages.transport.client import StageClient


class _Results(Consumer):
    """What is told of an engine's results: its stage, which is made after it."""

    stage: SimulatedThinker | SimulatedTalker

    def outputs(self, reqs: list[Request]) -> None:
        self.stage.outputs(reqs)

    def finished(self, req: Request) -> None:
        self.stage.finished(req)


@dataclass(eq=False, slots=True)
class Process:
    """One replica, and its present process.

    entry: as the orchestrator sees it. number: of its device.
    n_frames, n_rebuilt: of its processes that have died.
    """

    entry: Replica
    number: int
    stage: SimulatedStage
    link: StageLink
    n_frames: int = 0
    n_rebuilt: int = 0


class Replicas:
    """
    Args:
        drawn: what the response of each session's turn will be.
    Attributes:
        devices: by number.
        processes: of all stages.
    """

    def __init__(
        self,
        spec: ServerSpec,
        policies: Policies,
        events: Events,
        drawn: Mapping[str, TurnSpec],
    ):
        self._spec = spec
        self._policies = policies
        self._events = events
        self._drawn = drawn
        place = spec.placement
        used = {*place.thinkers, *place.talkers, *place.vocoders}
        self.devices = {number: self._device(number) for number in sorted(used)}
        self.processes = [
            self._process(stage, number, device)
            for stage, devices in (
                ("thinker", place.thinkers),
                ("talker", place.talkers),
                ("vocoder", place.vocoders),
            )
            for number, device in enumerate(devices)
        ]

    @property
    def replicas(self) -> list[Replica]:
        """As the supervisor's."""
        return [process.entry for process in self.processes]

    @property
    def thinkers(self) -> list[SimulatedThinker]:
        stages = (process.stage for process in self.processes)
        return [stage for stage in stages if isinstance(stage, SimulatedThinker)]

    @property
    def talkers(self) -> list[SimulatedTalker]:
        stages = (process.stage for process in self.processes)
        return [stage for stage in stages if isinstance(stage, SimulatedTalker)]

    @property
    def engines(self) -> list[Engine]:
        return [*(one.engine for one in self.thinkers), *(one.engine for one in self.talkers)]

    @property
    def n_frames(self) -> int:
        return sum(p.n_frames for p in self.processes) + sum(t.n_made for t in self.talkers)

    @property
    def n_rebuilt(self) -> int:
        before = sum(process.n_rebuilt for process in self.processes)
        return before + sum(thinker.kv.n_rebuilt for thinker in self.thinkers)

    # --- processes ---

    def kill(self, process: Process) -> None:
        """End a process now."""
        stage = process.stage
        process.entry.ready = None
        stage.die()
        process.link.fail_all("process ended")
        if isinstance(stage, SimulatedTalker):
            process.n_frames += stage.n_made
        if isinstance(stage, SimulatedThinker):
            process.n_rebuilt += stage.kv.n_rebuilt

    def start(self, process: Process) -> None:
        """Have another process serve in the place of one that has died."""
        entry = process.entry
        assert not entry.is_up, "it serves"
        process.stage, process.link = self._started(entry.spec, process.number)
        entry.client = cast(StageClient, process.link)
        entry.n_starts += 1
        self.ping(process)

    def ping(self, process: Process) -> None:
        """Read the gauges of a process that serves, as the supervisor does."""
        stage = process.stage
        load = {}
        if isinstance(stage, SimulatedThinker | SimulatedTalker):
            pool = stage.engine.pool
            load = {"kv_tokens_used": float(pool.used), "kv_tokens_total": float(pool.total)}
        process.entry.ready = Ready(
            "", stage=process.entry.spec.stage, pid=1, startup_s=0, load=load
        )

    def _process(self, stage: str, number: int, device: int) -> Process:
        spec = StageSpec(
            stage=stage,
            replica=number,
            model_path="",
            family="",
            cache_dir="",
            address="",
            same_host=True,
            run_dir="",
            served_name="",
            device=str(device),
            policies=self._policies,
        )
        served, link = self._started(spec, device)
        entry = Replica(spec, client=cast(StageClient, link), n_starts=1)
        process = Process(entry, device, served, link)
        self.ping(process)
        return process

    def _started(self, spec: StageSpec, device: int) -> tuple[SimulatedStage, StageLink]:
        host = self._spec.host
        stage: SimulatedStage
        if spec.stage == "thinker":
            hops = Hops(host.report_s / 2, host.text_s / 2)
            stage = self._thinker(spec.name, device, hops)
        elif spec.stage == "talker":
            hops = Hops(host.text_s / 2, host.to_client_s / 4)
            stage = self._talker(spec.name, device, hops)
        else:
            hops = Hops(host.to_client_s / 4, host.to_client_s / 4)
            stage = SimulatedVocoder(spec.name, self._decoder(device))
        return stage, StageLink(stage, self._events, hops)

    # --- stages ---

    def _thinker(self, name: str, device: int, hops: Hops) -> SimulatedThinker:
        spec, policies, results = self._spec, self._policies, _Results()
        engine = self._engine(device, results, is_thinker=True)
        tiers = None
        if policies.next_use:
            tiers = Tiers(spec.tier(policies), self._events, engine.pool)
        kv = ThinkerKv(
            pool=engine.pool,
            policies=policies,
            header=spec.header_tokens,
            tiers=tiers,
            stateless=spec.stateless,
        )
        results.stage = SimulatedThinker(
            name,
            self._events,
            engine,
            kv,
            spec.host,
            self._drawn,
            to_engine_s=max(0.0, spec.host.report_s - hops.to_stage_s),
            prepare_s=max(0.0, spec.host.to_thinker_s - hops.to_stage_s),
            has_feed=bool(policies),
        )
        return results.stage

    def _talker(self, name: str, device: int, hops: Hops) -> SimulatedTalker:
        host, results = self._spec.host, _Results()
        results.stage = SimulatedTalker(
            name,
            self._events,
            self._engine(device, results, is_thinker=False),
            self._drawn,
            to_engine_s=max(0.0, host.report_s - hops.to_stage_s),
            prepare_s=max(0.0, host.to_talker_s - host.text_s),
            has_window=self._policies.retention,
        )
        return results.stage

    def _engine(self, device: int, results: Consumer, *, is_thinker: bool) -> Engine:
        spec = self._spec
        engine = spec.thinker(device) if is_thinker else spec.talker
        total = spec.thinker_tokens if is_thinker else spec.talker_tokens
        constants = spec.thinker_policy if is_thinker else spec.talker_policy
        at_least = max(MIN_REQUEST_ROWS, spec.max_sessions + SPARE_REQUEST_ROWS)
        rows = spec.max_running_requests or at_least
        return Engine(
            engine,
            self._events,
            self.devices[device],
            KvPool(name=engine.name, total=total, rows=rows),
            # The decisions take no simulated time: to measure theirs would take most of the run.
            rounds_of(self._policies, constants, spec.chunk_tokens, cpu_s=lambda: 0.0),
            results,
        )

    def _decoder(self, device: int) -> Vocoder:
        spec = self._spec
        return Vocoder(
            self._events,
            self.devices[device],
            spec.model.vocoder,
            spec.vocoder,
            spec.host.vocoder_round_s,
            spec.host.launch_s,
        )

    def _device(self, number: int) -> Device:
        spec, events = self._spec, self._events
        if not spec.placement.is_shared(number):
            return Device(events)
        device = Device(events)
        if spec.sharing != "queue":
            device = SharedDevice(events, by_slices=spec.sharing == "time-slices")
        if not self._policies.arbiter:
            return device
        return ArbitratedDevice(events, lead_s([spec.host.launch_s]), device)
