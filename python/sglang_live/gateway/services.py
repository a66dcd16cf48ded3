"""What all realtime connections of a process share."""

from dataclasses import dataclass, field

from sglang_live.clock import Clock
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.rate_limits import RateLimits
from sglang_live.gateway.turn_ends import TurnEnds
from sglang_live.interaction.endpoint import EndpointModel
from sglang_live.interaction.habits import Callers
from sglang_live.interaction.silero import SpeechModel
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.telemetry.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeServices:
    orchestrator: Orchestrator
    config: GatewayConfig
    speech_model: SpeechModel
    endpoint_model: EndpointModel | None = None
    clock: Clock
    metrics: GatewayMetrics
    rate_limits: RateLimits = field(init=False)
    turn_ends: TurnEnds | None = field(init=False)
    callers: Callers = field(default_factory=Callers)

    def __post_init__(self):
        limits = RateLimits(self.config.max_answers_per_minute, self.clock)
        object.__setattr__(self, "rate_limits", limits)
        model = self.endpoint_model
        ends = TurnEnds(model, self.clock, self.metrics) if model else None
        object.__setattr__(self, "turn_ends", ends)
