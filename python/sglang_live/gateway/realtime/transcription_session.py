"""A session of the Realtime protocol that transcribes: turns and their words, no responses.

In: client events, in order. Out: server events; what they ask of the call.
Owner: one TranscriptionSession per connection.
"""

from dataclasses import replace
from typing import Any

from msgspec import UNSET

from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.model import check_model, is_of_openai
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import (
    AnyClientEvent,
    SessionForm,
    SessionUpdate,
)
from sglang_live.gateway.realtime.session import Client, RealtimeSession
from sglang_live.gateway.realtime.session_config import (
    common_changes,
    config_json,
    first_config,
    include_changes,
    input_changes,
    resumable_change,
)
from sglang_live.orchestrator.sessions import Orchestrator, VoiceSession

TRANSCRIPTION = "transcription"
# Of a conversation.
_OTHER_SETTINGS = (
    *("output_modalities", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
    *("max_output_tokens", "temperature", "truncation"),
)


class TranscriptionSession(RealtimeSession):
    """
    preset: settings of the session from its client secret; None: the defaults.
    model: that the client named for it, one of OpenAI's or this server's.
    config: its settings at another gateway; None: it begins.
    """

    kind = TRANSCRIPTION

    def __init__(
        self,
        session: VoiceSession,
        client: Client,
        parts: GatewayParts,
        preset: SessionForm | None = None,
        model: str | None = None,
        config: SessionConfig | None = None,
    ):
        self._defaults = transcription_defaults(parts.orchestrator, parts.config, model)
        is_new, config = config is None, config or self._defaults
        if preset is not None and is_new:
            config = update_transcription(config, preset, self._defaults, parts.config)
        super().__init__(session, client, parts, config, answers=False)

    def _settings(self) -> dict[str, Any]:
        return transcription_json(self._config, self._session_id)

    async def _handle_own(self, event: AnyClientEvent) -> None:
        if not isinstance(event, SessionUpdate):
            raise ClientEventError(
                f"A transcription session has no {event.__struct_config__.tag}: it hears and "
                "writes, and says nothing.",
                code="transcription_session",
                param="type",
            )
        self._configure(
            update_transcription(self._config, event.session, self._defaults, self._parts.config)
        )


def transcription_defaults(
    orchestrator: Orchestrator, gateway: GatewayConfig, model: str | None = None
) -> SessionConfig:
    config = first_config(orchestrator, gateway)
    # Some clients fail on any model that the protocol does not name.
    named = {"model": model} if is_of_openai(model) else {}
    return _without_answers(replace(config, transcription=named))


def update_transcription(
    current: SessionConfig, form: SessionForm, defaults: SessionConfig, gateway: GatewayConfig
) -> SessionConfig:
    """Apply a session.update: absent keys keep their value, null ones return to the default.

    Raises:
        ClientEventError: with the path of the first faulty value.
        ModelNotFoundError: another model is named.
    """
    if form.type != TRANSCRIPTION:
        raise ClientEventError(
            f"This is a transcription session, which cannot become {form.type!r}.",
            code="unsupported_session_type",
            param="session.type",
        )
    for name in _OTHER_SETTINGS:
        if getattr(form, name) not in (UNSET, None):
            raise _of_conversations(f"session.{name}")
    check_model(defaults.model, form.model, "session.model", stock=True)
    common_changes(form, defaults, path="session")
    current = replace(current, **resumable_change(form), **include_changes(form, gateway))
    if not form.audio:
        return current
    if form.audio.output:
        raise _of_conversations("session.audio.output")
    if not form.audio.input:
        return current
    changed = replace(current, **input_changes(form.audio.input, current, defaults, gateway))
    if changed.frames is not None:
        raise _of_conversations("session.audio.input.turn_detection.type")
    if changed.transcription is None:
        changed = replace(changed, transcription=defaults.transcription)
    return _without_answers(changed)


def transcription_json(config: SessionConfig, session_id: str) -> dict[str, Any]:
    """The settings as the protocol shows them."""
    whole = config_json(config, session_id)
    heard = whole["audio"]["input"]
    if detection := heard["turn_detection"]:
        heard["turn_detection"] = {
            name: value
            for name, value in detection.items()
            if name not in ("create_response", "interrupt_response")
        }
    return {
        "type": TRANSCRIPTION,
        "object": "realtime.transcription_session",
        "id": session_id,
        "expires_at": None,
        "include": whole["include"],
        "audio": {"input": heard},
    }


def _without_answers(config: SessionConfig) -> SessionConfig:
    if config.turn_detection is None:
        return config
    return replace(
        config,
        turn_detection=replace(
            config.turn_detection,
            create_response=False,
            interrupt_response=False,
            idle_timeout_ms=None,
        ),
    )


def _of_conversations(path: str) -> ClientEventError:
    return ClientEventError(
        f"{path} is for conversations, not for a transcription session.",
        code="unknown_parameter",
        param=path,
    )
