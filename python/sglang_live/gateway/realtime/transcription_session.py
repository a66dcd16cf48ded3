"""One open transcription session: the user's turns and their words, without responses.

In: client events, in order. Out: server events; what they ask of the call.
Owner: one TranscriptionSession per connection.
"""

import asyncio
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import decode_base64
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.call.call import Call
from sglang_live.gateway.call.link import IdleSessionError
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.errors import ClientEventError, error_body
from sglang_live.gateway.model import check_model, is_of_openai
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import (
    AudioAppend,
    AudioClear,
    AudioCommit,
    ItemDelete,
    ItemRetrieve,
    SessionForm,
    SessionUpdate,
    parse_client_event,
)
from sglang_live.gateway.realtime.item_events import ItemEvents
from sglang_live.gateway.realtime.server_events import RealtimePort
from sglang_live.gateway.realtime.session_config import (
    common_changes,
    config_json,
    first_config,
    input_changes,
)
from sglang_live.orchestrator.sessions import Orchestrator, VoiceSession

TRANSCRIPTION = "transcription"
# Of a conversation.
_OTHER_SETTINGS = (
    *("output_modalities", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
    *("max_output_tokens", "temperature", "truncation"),
)


class TranscriptionSession:
    """
    preset: settings of the session from its client secret; None: the defaults.
    model: that the client named for it, one of OpenAI's or this server's.
    owner: owner of the client's key, for limits.
    """

    def __init__(
        self,
        session: VoiceSession,
        outbox: Outbox,
        parts: GatewayParts,
        preset: SessionForm | None = None,
        model: str | None = None,
        owner: str = ANONYMOUS,
    ):
        orchestrator, config = parts.orchestrator, parts.config
        self._defaults = transcription_defaults(orchestrator, config, model)
        self._config = self._defaults
        if preset is not None:
            self._config = update_transcription(self._config, preset, self._defaults, config)
        self._session_id = session.session_id
        self._emit = outbox.emit
        self._parts = parts
        port = RealtimePort(outbox.emit)
        self._call = Call(session, self._config, parts, port, outbox, owner, answers=False)
        self._items = ItemEvents(parts, self._call.changes, outbox.emit)

    @property
    def at_work(self) -> bool:
        return self._call.at_work

    def greet(self) -> None:
        self._emit("session.created", session=transcription_json(self._config, self._session_id))

    async def handle(self, frame: str) -> None:
        """Raises LiveError if the event is refused; it then has no effect."""
        match event := parse_client_event(frame):
            case AudioAppend():
                limit = self._parts.config.inputs.max_append_bytes
                form = self._config.input_format
                raw = decode_base64(event.audio, form, max_bytes=limit, param="audio")
                await self._call.turns.hear(raw)
            case AudioCommit():
                self._call.turns.commit()
            case AudioClear():
                self._call.turns.clear()
            case ItemDelete():
                self._items.delete(event)
            case ItemRetrieve():
                self._items.retrieve(event, self._config.input_format)
            case SessionUpdate():
                self._config = update_transcription(
                    self._config, event.session, self._defaults, self._parts.config
                )
                shown = transcription_json(self._config, self._session_id)
                self._emit("session.updated", session=shown)
                self._call.turns.configure(self._config)
            case _:
                kind = str(event.__struct_config__.tag)
                raise ClientEventError(
                    f"A transcription session has no {kind}: it hears and writes, and says "
                    "nothing.",
                    code="transcription_session",
                    param="type",
                )

    async def until_over(self) -> tuple[int, str]:
        """The protocol has no event that ends a call."""
        return await asyncio.Future()

    def part(self, error: LiveError) -> None:
        if isinstance(error, IdleSessionError):  # a restart has a close code of its own
            self._emit("error", error={**error_body(error), "event_id": None})

    async def close(self) -> None:
        await self._call.close()


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
    heard = config_json(config, session_id)["audio"]["input"]
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
        "include": None,
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
