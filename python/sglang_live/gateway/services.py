"""What all realtime connections of a process share."""

from dataclasses import dataclass, field

from sglang_live.clock import Clock
from sglang_live.gateway.config import GatewayConfig
from sglang_live.interaction.habits import Callers
from sglang_live.interaction.silero import SpeechModel
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.telemetry.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeServices:
    orchestrator: Orchestrator
    config: GatewayConfig
    speech_model: SpeechModel
    clock: Clock
    metrics: GatewayMetrics
    callers: Callers = field(default_factory=Callers)
