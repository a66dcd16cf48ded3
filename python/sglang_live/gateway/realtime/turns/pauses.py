"""Settings of a session's speech detection: which silence is a pause, and which ends the turn."""

from dataclasses import replace

from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.realtime.turn_detection import TurnDetection
from sglang_live.gateway.realtime.turns.endpointing import settings_of
from sglang_live.interaction.turn_end import PAUSE_MS
from sglang_live.interaction.vad import VadSettings


def speculates(detection: TurnDetection, gateway: GatewayConfig) -> bool:
    """Whether a pause may start a speculative turn."""
    return detection.create_response and gateway.speculate_ms is not None


def vad_settings(detection: TurnDetection, gateway: GatewayConfig, judges: bool) -> VadSettings:
    """judges: a model judges pauses for semantic_vad."""
    if detection.kind == "semantic_vad" and judges:
        return settings_of(detection)
    pause_ms = PAUSE_MS if gateway.prefills_at_pauses else None
    if speculates(detection, gateway):
        pause_ms = gateway.speculate_ms
    return replace(detection.vad, pause_ms=pause_ms)
