"""Settings of one Live session.

In: SessionForm of session.start. Out: LiveConfig, or ClientEventError with the path of what is
wrong or not honoured: all of that is refused before the session starts.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from msgspec import UNSET, UnsetType

from sglang_live.gateway.audio.codec import PCM, PCM_16K, PCMA, PCMU, WireFormat
from sglang_live.gateway.call.settings import SessionConfig, Truncation
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.json_forms import missing_parameter, unsupported_parameter
from sglang_live.gateway.live.decisions import DecisionSettings
from sglang_live.gateway.live.events import (
    AudioForm,
    ChoiceForm,
    ClientDelegation,
    DecisionsDelegation,
    DecisionsForm,
    Delegation,
    MessageForm,
    PcmaForm,
    PcmuForm,
    ResponsesDelegation,
    ResponsesForm,
    ScoreForm,
    SessionForm,
    UpdateForm,
    VoiceRef,
)
from sglang_live.gateway.live.work import BackendSettings
from sglang_live.gateway.model import check_model
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.tools import check_choice, read_choice, read_tools
from sglang_live.interaction.vad import TurnDetection

# What OpenAI's servers speak with unless they are told another voice.
_VOICE = "marin"
DELEGATE = {
    "type": "function",
    "name": "delegate",
    "description": (
        "Hand the task that the user has asked for to the application, which does it and reports "
        "the result later. It knows the conversation."
    ),
    "parameters": {"type": "object", "properties": {}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """
    call: settings of the call.
    instructions: the client's, for the echo. voice, input, safety_identifier: likewise.
    acknowledgement_delay_ms: from a delegation without words to a spoken acknowledgement.
    backend, decisions: of a session that delegates to them. None, both: the application does the
        work.
    on_track: its audio is no events.
    """

    call: SessionConfig
    instructions: str | None
    voice: str | dict[str, str]
    input: tuple[MessageForm, ...] = ()
    safety_identifier: str | None = None
    acknowledgement_delay_ms: int = 0
    backend: BackendSettings | None = None
    decisions: DecisionSettings | None = None
    on_track: bool = False

    def to_json(self, session_id: str, expires_at: int) -> dict[str, Any]:
        form = self.call.input_format
        target: dict[str, Any] = {"type": "client"}
        if self.backend is not None:
            target = {"type": "responses", "responses": self.backend.to_json()}
        elif self.decisions is not None:
            target = {"type": "decisions", "decisions": self.decisions.to_json()}
        return {
            "id": session_id,
            "expires_at": expires_at,
            "status": "active",
            "model": self.call.model,
            "instructions": self.instructions,
            "audio": {
                **({} if self.on_track else {"format": {"type": form.kind, "rate": form.rate_hz}}),
                "output": {"voice": self.voice},
            },
            "delegation": {
                **target,
                "acknowledgement_delay_ms": self.acknowledgement_delay_ms,
            },
            "input": [_message_json(message) for message in self.input],
            "store": False,
            "triggers": [],
            "safety_identifier": self.safety_identifier,
        }


def start_config(
    form: SessionForm, parts: GatewayParts, owner: str, *, on_track: bool = False
) -> LiveConfig:
    """
    Args:
        owner: of the client's key.
        on_track: its audio comes over WebRTC.
    Raises:
        ClientEventError: with the path of the first value that is wrong or not honoured.
        ModelNotFoundError: another model is named.
    """
    orchestrator, gateway = parts.orchestrator, parts.config
    parts.check_model(form.model, "session.model", stock=True)
    _refuse_unserved(form, on_track=on_track)
    if orchestrator.duplex_s:
        for name in ("delegation", "input"):
            if getattr(form, name):
                raise unsupported_parameter(f"session.{name}", _OF_TURNS)
    audio = form.audio or AudioForm()
    named = audio.output.voice if audio.output else None
    voice = named.id if isinstance(named, VoiceRef) else named or _VOICE
    if named is not None:
        parts.voice_of(owner, voice, "session.audio.output.voice")
    wire = _format(audio)
    # Blank instructions are none.
    instructions = form.instructions if (form.instructions or "").strip() else None
    call = SessionConfig(
        model=orchestrator.model_name,
        voice=voice,
        voices=parts.voices_of(owner),
        instructions=instructions or gateway.model.default_instructions,
        tools=(DELEGATE,),
        parallel_tool_calls=False,
        truncation=Truncation(retention=gateway.retention),
        input_format=PCM_16K if on_track else wire,  # what its packets are decoded to
        output_format=wire,
        transcription={},
        turn_detection=TurnDetection(
            kind="semantic_vad",
            vad=replace(gateway.turns.vad, silence_duration_ms=_SILENCE_MS),
            ignore_other_voices=gateway.model.knows_voices,
        ),
    )
    return LiveConfig(
        call=call,
        instructions=instructions,
        voice={"id": voice} if isinstance(named, VoiceRef) else voice,
        input=tuple(form.input or ()),
        safety_identifier=form.safety_identifier,
        acknowledgement_delay_ms=_delay_ms(
            form.delegation, _DECISION_MS if isinstance(form.delegation, DecisionsDelegation) else 0
        ),
        decisions=_first_decisions(form.delegation, parts),
        backend=_first_backend(form.delegation, parts),
        on_track=on_track,
    )


# From a delegation to decisions to a spoken acknowledgement: most decisions take less.
_DECISION_MS = 400
# Without a model that judges whether a turn is complete, this silence ends it.
_SILENCE_MS = 700


def update_config(config: LiveConfig, form: UpdateForm, parts: GatewayParts) -> LiveConfig:
    """Apply a session.update: absent keys keep their value.

    Raises:
        ClientEventError: with the path of the first value that is wrong or not honoured.
    """
    _refuse_triggers(form.triggers)
    if form.delegation is UNSET:
        return config
    if parts.orchestrator.duplex_s:
        raise unsupported_parameter("session.delegation", _OF_TURNS)
    kind: type[Delegation] = ClientDelegation
    if config.backend is not None:
        kind = ResponsesDelegation
    elif config.decisions is not None:
        kind = DecisionsDelegation
    is_null = form.delegation is None and kind is ClientDelegation  # null is the client
    if not is_null and not isinstance(form.delegation, kind):
        raise ClientEventError(
            "The type of delegation cannot change.",
            code="immutable_field_update",
            param="session.delegation.type",
        )
    backend = config.backend
    if backend is not None and isinstance(form.delegation, ResponsesDelegation):
        backend = _merged(backend, form.delegation.responses or ResponsesForm(), parts)
    decisions = config.decisions
    if decisions is not None and isinstance(form.delegation, DecisionsDelegation):
        decisions = _decided(decisions, form.delegation.decisions or DecisionsForm(), parts)
    delay_ms = _delay_ms(form.delegation, config.acknowledgement_delay_ms)
    return replace(config, acknowledgement_delay_ms=delay_ms, backend=backend, decisions=decisions)


_OF_TURNS = "is for models with turns; this one hears and speaks at the same time."
_BACKEND = "session.delegation.responses"


def _first_backend(delegation: Delegation | None, parts: GatewayParts) -> BackendSettings | None:
    if not isinstance(delegation, ResponsesDelegation):
        return None
    form = delegation.responses
    if form is None:
        raise missing_parameter(_BACKEND)
    if form.model is UNSET or form.model is None:
        raise missing_parameter(f"{_BACKEND}.model")
    return _merged(BackendSettings(model=form.model), form, parts)


def _merged(current: BackendSettings, form: ResponsesForm, parts: GatewayParts) -> BackendSettings:
    """The settings with those of a form: absent keys keep their value, null ones are the default.

    Raises:
        ClientEventError: a tool is no function, or a choice names none.
        ModelNotFoundError: another model is named.
    """
    default = BackendSettings(model=current.model)
    changes: dict[str, Any] = {}
    for name in (field.name for field in fields(BackendSettings)):
        if (sent := getattr(form, name)) is not UNSET:
            changes[name] = getattr(default, name) if sent is None else sent
    if form.model not in (UNSET, None):
        _check_backend(changes["model"], parts)
    if form.tools:
        changes["tools"] = read_tools(form.tools, f"{_BACKEND}.tools")
    elif "tools" in changes:
        changes["tools"] = ()
    if form.tool_choice:
        changes["tool_choice"] = read_choice(form.tool_choice, f"{_BACKEND}.tool_choice")
    merged = replace(current, **changes)
    check_choice(merged.tools, merged.tool_choice, path=f"{_BACKEND}.tool_choice")
    return merged


def _check_backend(name: str, parts: GatewayParts) -> None:
    """Raises ModelNotFoundError if no text model has this name, as far as that is known."""
    known = parts.config.text_server
    if known.live_backend is None or known.live_backend_model:
        served, aliases = parts.orchestrator.model_name, (known.live_backend_model,)
        check_model(served, name, f"{_BACKEND}.model", stock=True, aliases=aliases)


_DECISIONS = "session.delegation.decisions"


def _first_decisions(delegation: Delegation | None, parts: GatewayParts) -> DecisionSettings | None:
    if not isinstance(delegation, DecisionsDelegation):
        return None
    form = delegation.decisions
    for name in ("model", "questions"):
        if form is None or getattr(form, name) in (UNSET, None):
            raise missing_parameter(f"{_DECISIONS}.{name}")
    assert form is not None and isinstance(form.model, str)
    return _decided(DecisionSettings(model=form.model), form, parts)


def _decided(
    current: DecisionSettings, form: DecisionsForm, parts: GatewayParts
) -> DecisionSettings:
    """The settings with those of a form; absent and null ones keep their value.

    Raises:
        ClientEventError: two options are the same.
        ModelNotFoundError: another model is named.
    """
    model, questions = form.model or current.model, form.questions or current.questions
    parts.check_model(model, f"{_DECISIONS}.model", stock=True)
    for n, question in enumerate(questions):
        names: list[Any] = []
        at = "levels"
        if isinstance(question, ChoiceForm):
            at, names = "choices", [(type(one.value), one.value) for one in question.choices]
        elif isinstance(question, ScoreForm):
            names = [one.label for one in question.levels]
        if len(set(names)) < len(names):
            raise ClientEventError(
                "Two options are the same.", param=f"{_DECISIONS}.questions[{n}].{at}"
            )
    return DecisionSettings(model=model, questions=tuple(questions))


def _delay_ms(delegation: Delegation | UnsetType | None, current_ms: int) -> int:
    if delegation is None or delegation is UNSET:
        return current_ms
    sent = delegation.acknowledgement_delay_ms
    return current_ms if sent is UNSET else sent or 0


def _refuse_unserved(form: SessionForm, *, on_track: bool) -> None:
    if form.store:
        raise unsupported_parameter("session.store", "is false: sessions are not stored.")
    _refuse_triggers(form.triggers)
    for name in ("client", "idle_timeout_s", "wake_policy"):
        if getattr(form, name) is not None:
            why = "is not served." if on_track else "is for WebRTC, not for a WebSocket."
            raise unsupported_parameter(f"session.{name}", why)
    if on_track and form.audio is not None and form.audio.format is not None:
        raise unsupported_parameter("session.audio.format", "is for a WebSocket, not for WebRTC.")
    for n, message in enumerate(form.input or ()):
        allowed = ("text", "output_text") if message.role == "assistant" else ("input_text",)
        if message.content[0].type not in (None, *allowed):
            raise ClientEventError(
                f"A message of {message.role} has {' or '.join(allowed)}.",
                param=f"session.input[{n}].content[0].type",
            )


def _refuse_triggers(triggers: list[dict[str, Any]] | None) -> None:
    if triggers:
        raise unsupported_parameter(
            "session.triggers", "is empty: decision.create asks for a decision."
        )


def _format(audio: AudioForm) -> WireFormat:
    match audio.format:
        case PcmuForm():
            return PCMU
        case PcmaForm():
            return PCMA
        case None:
            return PCM
    return PCM_16K if audio.format.rate == PCM_16K.rate_hz else PCM


def _message_json(message: MessageForm) -> dict[str, Any]:
    kind = "output_text" if message.role == "assistant" else "input_text"
    content = [{"type": kind, "text": message.content[0].text}]
    return {"type": "message", "role": message.role, "content": content}
