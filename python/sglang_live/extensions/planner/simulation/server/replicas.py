"""The replicas of a simulated server's stages, and what each of them holds."""

from dataclasses import dataclass, field

from sglang_live.bridge.rounds import rounds_of
from sglang_live.extensions.planner.simulation.engine.engine import (
    Consumer,
    Engine,
    EngineSpec,
)
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.events import (
    ArbitratedDevice,
    Device,
    Events,
)
from sglang_live.extensions.planner.simulation.server.playback import HeardFeed
from sglang_live.extensions.planner.simulation.server.sessions import Sessions
from sglang_live.extensions.planner.simulation.server.tiers import Tiers
from sglang_live.extensions.planner.simulation.server.vocoder import Vocoder
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.policy.arbiter import lead_s
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.policies import Policies

# SGLang's rows beyond the sessions (stage_specs.py).
_SPARE_ROWS = 8


@dataclass(eq=False, slots=True, kw_only=True)
class Replica:
    """sessions: ids of those that stay with it, as in stages/supervisor.py."""

    name: str
    device: int
    is_up: bool = True
    sessions: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True, kw_only=True)
class EngineReplica(Replica):
    engine: Engine
    feed: HeardFeed


@dataclass(eq=False, slots=True, kw_only=True)
class ThinkerReplica(EngineReplica):
    """kv: what it holds of each session."""

    kv: Sessions


@dataclass(eq=False, slots=True, kw_only=True)
class VocoderReplica(Replica):
    vocoder: Vocoder


class Replicas:
    """
    Attributes:
        devices: by number.
    """

    def __init__(
        self, spec: ServerSpec, policies: Policies, events: Events, consumers: tuple[Consumer, ...]
    ):
        self._spec = spec
        self._policies = policies
        self._events = events
        self._consumers = consumers
        placement = spec.placement
        used = {*placement.thinkers, *placement.talkers, *placement.vocoders}
        self.devices = {number: self._device(number) for number in sorted(used)}
        self.thinkers = [self._thinker(n, at) for n, at in enumerate(placement.thinkers)]
        self.talkers = [self._talker(n, at) for n, at in enumerate(placement.talkers)]
        self.vocoders = [self._vocoder(n, at) for n, at in enumerate(placement.vocoders)]

    def _device(self, number: int) -> Device:
        by_turns = self._policies.arbiter and self._spec.placement.is_shared(number)
        return (
            ArbitratedDevice(self._events, lead_s([self._spec.host.launch_s]))
            if by_turns
            else Device()
        )

    @property
    def every(self) -> list[Replica]:
        return [*self.thinkers, *self.talkers, *self.vocoders]

    def restart(self, replica: Replica) -> None:
        """Give a replica what a new process of it has. Its sessions stay with it."""
        if isinstance(replica, ThinkerReplica):
            replica.engine = self._engine(replica.device, is_thinker=True)
            n_rebuilt = replica.kv.n_rebuilt
            replica.kv = self._kv(replica.engine.pool)
            replica.kv.n_rebuilt = n_rebuilt
            replica.feed = self._feed(replica.engine)
        elif isinstance(replica, EngineReplica):
            replica.engine = self._engine(replica.device, is_thinker=False)
            replica.feed = self._feed(replica.engine)
        elif isinstance(replica, VocoderReplica):
            replica.vocoder = self._decoder(replica.device)

    def _thinker(self, number: int, device: int) -> ThinkerReplica:
        engine = self._engine(device, is_thinker=True)
        return ThinkerReplica(
            name=f"thinker/{number}",
            device=device,
            engine=engine,
            feed=self._feed(engine),
            kv=self._kv(engine.pool),
        )

    def _talker(self, number: int, device: int) -> EngineReplica:
        engine = self._engine(device, is_thinker=False)
        name = f"talker/{number}"
        return EngineReplica(name=name, device=device, engine=engine, feed=self._feed(engine))

    def _vocoder(self, number: int, device: int) -> VocoderReplica:
        name = f"vocoder/{number}"
        return VocoderReplica(name=name, device=device, vocoder=self._decoder(device))

    def _engine(self, device: int, *, is_thinker: bool) -> Engine:
        spec = self._spec
        constants: PolicyConfig = spec.thinker_policy if is_thinker else spec.talker_policy
        engine: EngineSpec = spec.thinker(device) if is_thinker else spec.talker
        total = spec.thinker_tokens if is_thinker else spec.talker_tokens
        rows = spec.max_running_requests or spec.max_sessions + _SPARE_ROWS
        return Engine(
            engine,
            self._events,
            self.devices[device],
            KvPool(name=engine.name, total=total, rows=rows),
            # The decisions take no simulated time: to measure theirs would take most of the run.
            rounds_of(self._policies, constants, spec.chunk_tokens, cpu_s=lambda: 0.0),
            self._consumers[0 if is_thinker else 1],
        )

    def _kv(self, pool: KvPool) -> Sessions:
        spec, policies = self._spec, self._policies
        tiers = Tiers(spec.tier(policies), self._events, pool) if policies.next_use else None
        header, stateless = spec.header_tokens, spec.stateless
        return Sessions(pool, policies, header, tiers, stateless=stateless)

    def _feed(self, engine: Engine) -> HeardFeed:
        return HeardFeed(self._events, engine, self._spec.host.report_s)

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
