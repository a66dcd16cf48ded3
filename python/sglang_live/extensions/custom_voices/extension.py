"""Voices that clients make of recordings: /v1/audio/voices, on a server with --custom-voices."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_live.errors import BadInputError, LiveError
from sglang_live.extension import Addition, Extension
from sglang_live.extensions.custom_voices.config import ROUTES
from sglang_live.gateway.auth import KeyConfig
from sglang_live.policy.policies import Policies
from sglang_live.settings import Count, Settings, flag, read_flags

if TYPE_CHECKING:
    from sglang_live.gateway.parts import GatewayAddition, GatewayParts
    from sglang_live.models.family import ModelFacts
    from sglang_live.stages.spec import StageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceFlags(Settings):
    custom_voices: Path | None = flag(
        None, "clients may make voices of recordings, kept in this folder", value="DIR"
    )
    custom_voice_keys: tuple[str, ...] = flag(
        (),
        "--api-key that may make voices; may be given several times",
        name="custom-voice-key",
        value="KEY",
        env="SGLANG_LIVE_CUSTOM_VOICE_KEYS",
    )
    custom_voices_per_key: Count = flag(20, "voices of one key")

    def check(self) -> None:
        if (self.custom_voices is None) != (not self.custom_voice_keys):
            raise BadInputError("--custom-voices and --custom-voice-key belong together")


class NoCustomVoicesError(LiveError):
    code = "custom_voices_off"
    http_status = 404

    def __init__(self) -> None:
        super().__init__("Clients of this server make no voices: it runs without --custom-voices.")


class NoCustomVoices(Addition):
    """Routes that name the flag."""

    def gateway(self, parts: "GatewayParts") -> "GatewayAddition":
        from sglang_live.gateway.parts import GatewayAddition, refusing

        refusals = GatewayAddition()
        refusals.routes = dict.fromkeys(ROUTES, refusing(NoCustomVoicesError()))
        return refusals


class CustomVoices(Addition):
    def __init__(self, flags: VoiceFlags):
        assert flags.custom_voices is not None
        self._flags, self._folder = flags, flags.custom_voices
        self._model, self._rate_hz, self._min_s = "", 0, 0.0

    def check(self, model: "ModelFacts") -> None:
        if not model.voice_rate_hz:
            raise BadInputError(
                f"--custom-voices: {model.path.name} makes no voices while it serves; the Base "
                "checkpoints of Qwen3-TTS do, and CosyVoice and Chatterbox with their encoders"
            )
        # Another checkpoint would speak in another voice.
        self._model = f"{model.family}:{model.path.name}"
        self._rate_hz, self._min_s = model.voice_rate_hz, model.least_recorded_s

    def start(self, run_dir: Path) -> None:
        """Raises BadInputError: the folder cannot be used, or another server uses it."""
        from sglang_live.extensions.custom_voices.store import VoiceStore

        self._store = VoiceStore(self._folder, self._model, self._flags.custom_voices_per_key)

    def gateway(self, parts: "GatewayParts") -> "GatewayAddition":
        from sglang_live.extensions.custom_voices.routes import VoiceRoutes

        keys = self._flags.custom_voice_keys
        return VoiceRoutes(parts, self._store, keys, self._rate_hz, self._min_s)


class CustomVoicesExtension(Extension):
    title = "custom voices"
    flags = VoiceFlags

    def addition(
        self, own: argparse.Namespace, policies: Policies, stages: "Mapping[str, StageConfig]"
    ) -> Addition:
        flags = read_flags(own, VoiceFlags)
        if flags.custom_voices is None:
            return NoCustomVoices()
        if not set(flags.custom_voice_keys) <= set(read_flags(own, KeyConfig).accepted):
            raise BadInputError("each --custom-voice-key has to be an --api-key, too")
        return CustomVoices(flags)


EXTENSION = CustomVoicesExtension()
