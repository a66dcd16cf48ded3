"""Client events of OpenAI's Live API: their forms, and the reader of a frame.

In: a text frame. Out: one of the protocol's events, or ClientEventError.
Null is not absent: `delegation_id` is required and may be null. A key that the protocol does not
have is an error; what this server does not honour is refused by session_config.py and session.py,
with its path.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import Ignored, ServiceTier, Strict, loosely_read, read_form
from sglang_live.gateway.webrtc.processes import MAX_SDP

_MAX_ID = 512
# Of an append: OpenAI's limit is 500 tokens, and few words are longer than 16 characters.
_MAX_APPEND = 8_000
_MAX_MESSAGES = 128
# Each is one letter for the model.
MOST_OPTIONS = 52
# Of one decision: each is a turn of its own.
_Questions = Meta(min_length=1, max_length=64)

Id = Annotated[str, Meta(max_length=_MAX_ID)]
AppendedText = Annotated[str, Meta(max_length=_MAX_APPEND)]
Delay = Annotated[int, Meta(ge=0, le=60_000)]


# --- the settings of a session ---


class PcmForm(Strict, tag="audio/pcm", tag_field="type"):
    rate: Literal[16_000, 24_000]


class PcmuForm(Strict, tag="audio/pcmu", tag_field="type"):
    rate: Literal[8_000]


class PcmaForm(Strict, tag="audio/pcma", tag_field="type"):
    rate: Literal[8_000]


class VoiceRef(Strict):
    id: Id


class OutputForm(Strict):
    voice: Id | VoiceRef | None = None


class AudioForm(Strict):
    format: PcmForm | PcmuForm | PcmaForm | None = None
    output: OutputForm | None = None


class ClientDelegation(Strict, tag="client", tag_field="type"):
    acknowledgement_delay_ms: Delay | UnsetType | None = UNSET


class ResponsesForm(Strict):
    """reasoning, service_tier, text: no effect."""

    model: Id | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    tools: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_choice: str | dict[str, Any] | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    max_output_tokens: Annotated[int, Meta(ge=16)] | UnsetType | None = UNSET
    reasoning: Ignored = None
    service_tier: ServiceTier | None = None
    text: Ignored = None


class ResponsesDelegation(Strict, tag="responses", tag_field="type"):
    responses: ResponsesForm | None = None
    acknowledgement_delay_ms: Delay | UnsetType | None = UNSET


class TextPartForm(Strict, tag="input_text", tag_field="type"):
    text: str


class JsonPartForm(Strict, tag="input_json", tag_field="type"):
    data: dict[str, Any] | list[dict[str, Any]]


Told = str | list[TextPartForm | JsonPartForm]
_Options = Meta(min_length=2, max_length=MOST_OPTIONS)


class OptionForm(Strict):
    value: str | bool
    description: str | None = None


class LevelForm(Strict):
    label: str
    description: str | None = None


class QuestionForm(Strict):
    instructions: Told
    name: Id | None = None


class PredicateForm(QuestionForm, tag="predicate", tag_field="type", kw_only=True):
    pass


class ChoiceForm(QuestionForm, tag="choice", tag_field="type", kw_only=True):
    choices: Annotated[list[OptionForm], _Options]


class ScoreForm(QuestionForm, tag="score", tag_field="type", kw_only=True):
    levels: Annotated[list[LevelForm], _Options]


Question = PredicateForm | ChoiceForm | ScoreForm


class DecisionsForm(Strict):
    model: Id | UnsetType | None = UNSET
    questions: Annotated[list[Question], _Questions] | UnsetType | None = UNSET


class DecisionsDelegation(Strict, tag="decisions", tag_field="type"):
    decisions: DecisionsForm | None = None
    acknowledgement_delay_ms: Delay | UnsetType | None = UNSET


Delegation = ClientDelegation | ResponsesDelegation | DecisionsDelegation


class TextForm(Strict):
    text: str
    type: Literal["input_text", "output_text", "text"] | None = None


class MessageForm(Strict):
    """id, status: no effect. content: one part."""

    role: Literal["developer", "user", "assistant"]
    content: Annotated[list[TextForm], Meta(min_length=1, max_length=1)]
    type: Literal["message"] | None = None
    id: Ignored = None
    status: Literal["completed", "incomplete"] | None = None


class SessionForm(Strict):
    """safety_identifier: no effect. store, triggers, client, idle_timeout_s, wake_policy: refused
    where they ask for something."""

    model: Id
    instructions: str | None = None
    audio: AudioForm | None = None
    delegation: Delegation | None = None
    input: Annotated[list[MessageForm], Meta(max_length=_MAX_MESSAGES)] | None = None
    store: bool | None = None
    triggers: list[dict[str, Any]] | None = None
    safety_identifier: str | None = None
    client: dict[str, Any] | None = None
    idle_timeout_s: float | None = None
    wake_policy: dict[str, Any] | None = None


class TransportForm(Strict, tag="webrtc", tag_field="type"):
    sdp: Annotated[str, Meta(min_length=1, max_length=MAX_SDP)]


class CallForm(Strict):
    """A session over WebRTC."""

    session: SessionForm
    transport: TransportForm


class UpdateForm(Strict):
    delegation: Delegation | UnsetType | None = UNSET
    triggers: list[dict[str, Any]] | None = None


# --- events ---


class ClientEvent(Strict):
    event_id: Id | None = None


class SessionStart(ClientEvent, tag="session.start", kw_only=True):
    session: SessionForm


class SessionUpdate(ClientEvent, tag="session.update", kw_only=True):
    session: UpdateForm


class AudioAppend(ClientEvent, tag="session.input_audio.append", kw_only=True):
    audio: str


class Mute(ClientEvent, tag="session.input_audio.mute"):
    pass


class Unmute(ClientEvent, tag="session.input_audio.unmute"):
    pass


class FixturePlay(ClientEvent, tag="session.output_audio.fixture.play", kw_only=True):
    audio: str


class Append(ClientEvent, kw_only=True):
    content: AppendedText
    delegation_id: Id | None


class InstructionsAppend(Append, tag="session.instructions.append", kw_only=True):
    pass


class ThinkingAppend(Append, tag="session.thinking.append", kw_only=True):
    pass


class CommentaryAppend(Append, tag="session.commentary.append", kw_only=True):
    pass


class ResponseItemCreate(ClientEvent, tag="response.item.create", kw_only=True):
    item: dict[str, Any]


class ResponseCreate(ClientEvent, tag="response.create"):
    pass


class DecisionCreate(ClientEvent, tag="decision.create", kw_only=True):
    event_id: Id


class DecisionItemCreate(ClientEvent, tag="decision.item.create", kw_only=True):
    item: dict[str, Any]


class DecisionItemDelete(ClientEvent, tag="decision.item.delete", kw_only=True):
    item_id: Id


class SessionClose(ClientEvent, tag="session.close"):
    pass


class DtmfSend(ClientEvent, tag="transport.dtmf.send", kw_only=True):
    event: str


AnyClientEvent = (
    SessionStart
    | SessionUpdate
    | AudioAppend
    | Mute
    | Unmute
    | FixturePlay
    | InstructionsAppend
    | ThinkingAppend
    | CommentaryAppend
    | ResponseItemCreate
    | ResponseCreate
    | DecisionCreate
    | DecisionItemCreate
    | DecisionItemDelete
    | SessionClose
    | DtmfSend
)
SUPPORTED = (
    *("session.start", "session.update", "session.close", "session.input_audio.append"),
    *("session.input_audio.mute", "session.input_audio.unmute"),
    *("session.output_audio.fixture.play", "session.instructions.append"),
    *("session.thinking.append", "session.commentary.append"),
    *("response.item.create", "response.create"),
    *("decision.create", "decision.item.create", "decision.item.delete"),
)


class _Envelope(msgspec.Struct):
    type: Any = None
    event_id: Any = None


_decoder = msgspec.json.Decoder(AnyClientEvent)
_envelope_decoder = msgspec.json.Decoder(_Envelope)


def parse_client_event(frame: str) -> AnyClientEvent:
    """Read one text frame.

    Raises:
        ClientEventError: the frame is not JSON or not an event, or a field is missing, wrong or
            unknown; `param` is the path of that field.
    """
    try:
        event: AnyClientEvent = read_form(frame, _decoder)
        return event
    except ClientEventError as error:
        kind = _envelope(frame).type
        if error.param != "type" or not isinstance(kind, str):
            raise
        raise ClientEventError(
            f"Unknown event '{cut(kind)}'. Supported are: {', '.join(SUPPORTED)}.", param="type"
        ) from None


def event_id_of(frame: str) -> str | None:
    """The client's event_id in a frame, if it can be read."""
    event_id = _envelope(frame).event_id
    if not isinstance(event_id, str) or len(event_id) > _MAX_ID:
        return None
    return None if any("\ud800" <= c <= "\udfff" for c in event_id) else event_id


def _envelope(frame: str) -> _Envelope:
    try:
        return _envelope_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        event = loosely_read(frame)  # it may hold half surrogate pairs, which the decoder refuses
        event = event if isinstance(event, dict) else {}
        return _Envelope(event.get("type"), event.get("event_id"))
