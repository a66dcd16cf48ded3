"""Client events of the Realtime protocol: their forms, and the reader of a frame.

In: a text frame. Out: one of the protocol's eleven events or the extension playback.ack, or
ClientEventError.
UNSET is a key that the client did not send, None an explicit null. A key that neither the protocol
nor this server has is an error. Keys of type Ignored change nothing; those in
session_config.WITHOUT_EFFECT would, and are refused.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sglang_live.gateway.beta_names import ga_event
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import Ignored, Strict, loosely_read, read_form
from sglang_live.gateway.pictures import Detail

# Characters. Responses and errors repeat these texts, and must not fill the send buffer.
MAX_ID, MAX_NAME, MAX_HINT = 128, 512, 16_384
# Words or languages of a hint.
MAX_LISTED = 64
NullableStr = str | None
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
# Names that are looked up, or that other programs chose: an empty one is valid but not found.
Name = Annotated[str, Meta(max_length=MAX_NAME)]

# Some clients compute milliseconds by division and send 12.0 for 12.
WholeNumber = Annotated[float, Meta(multiple_of=1)]


class FormatForm(Strict):
    type: str
    rate: int | UnsetType | None = UNSET


class TurnDetectionForm(Strict):
    """model_version: no effect; some clients send it for servers with several detectors."""

    type: str | UnsetType | None = UNSET
    threshold: Annotated[float, Meta(ge=0, le=1)] | UnsetType | None = UNSET
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=30_000)] | UnsetType | None = UNSET
    silence_duration_ms: Annotated[int, Meta(ge=0, le=60_000)] | UnsetType | None = UNSET
    idle_timeout_ms: Annotated[int, Meta(ge=1_000, le=600_000)] | UnsetType | None = UNSET
    eagerness: str | UnsetType | None = UNSET
    create_response: bool | UnsetType | None = UNSET
    interrupt_response: bool | UnsetType | None = UNSET
    confirm_ms: Annotated[int, Meta(ge=0, le=2_000)] | UnsetType | None = UNSET
    ignore_echo: bool | UnsetType | None = UNSET
    ignore_backchannels: bool | UnsetType | None = UNSET
    ignore_side_talk: bool | UnsetType | None = UNSET
    ignore_other_voices: bool | UnsetType | None = UNSET
    ignore_other_turns: bool | UnsetType | None = UNSET
    frame_ms: Annotated[int, Meta(ge=80, le=2_000, multiple_of=80)] | UnsetType | None = UNSET
    max_tokens: Annotated[int, Meta(ge=1, le=64)] | UnsetType | None = UNSET
    model_version: Ignored = None


class TranscriptionForm(Strict):
    """delay: for other transcribers (WITHOUT_EFFECT)."""

    model: Name | None = None
    language: Name | None = None
    prompt: Annotated[str, Meta(max_length=MAX_HINT)] | None = None
    delay: Ignored = None
    keywords: Annotated[list[Name], Meta(max_length=MAX_LISTED)] | None = None
    languages: Annotated[list[Name], Meta(max_length=MAX_LISTED)] | None = None


class NoiseReductionForm(Strict):
    type: NullableStr = None
    strength: float | None = None


class VoiceRef(Strict):
    id: Name


def voice_name(voice: str | VoiceRef | None) -> str | None:
    return voice.id if isinstance(voice, VoiceRef) else voice


class AudioInputForm(Strict):
    format: FormatForm | UnsetType | None = UNSET
    transcription: TranscriptionForm | UnsetType | None = UNSET
    turn_detection: TurnDetectionForm | UnsetType | None = UNSET
    noise_reduction: NoiseReductionForm | None = None


class AudioOutputForm(Strict):
    format: FormatForm | UnsetType | None = UNSET
    voice: Name | VoiceRef | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] | UnsetType | None = UNSET


class AudioForm(Strict):
    input: AudioInputForm | UnsetType | None = UNSET
    output: AudioOutputForm | UnsetType | None = UNSET


class ResponseAudioForm(Strict):
    output: AudioOutputForm | UnsetType | None = UNSET


# 64 tokens are five seconds of audio: with less, a session drops the user's last question. A
# million exceeds any context and fits into the stages' integers.
_LimitTokens = Annotated[int, Meta(ge=64, le=1_000_000)]


class TokenLimitsForm(Strict):
    post_instructions: _LimitTokens | None = None


class RetentionRatioForm(Strict):
    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Meta(gt=0, le=1)]
    token_limits: TokenLimitsForm | None = None


class TracingForm(Strict):
    group_id: NullableStr = None
    metadata: Ignored = None
    workflow_name: NullableStr = None


class PromptForm(Strict):
    id: str
    variables: dict[str, Any] | None = None
    version: NullableStr = None


class ReasoningForm(Strict):
    effort: NullableStr = None


class _Settings(Strict):
    """Settings that session.update and response.create share."""

    output_modalities: list[str] | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    tools: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_choice: str | dict[str, Any] | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    max_output_tokens: int | str | UnsetType | None = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    prompt: PromptForm | None = None
    reasoning: ReasoningForm | None = None


class SessionForm(_Settings, kw_only=True):
    """object, id, expires_at: no effect; sent by clients that repeat a session's settings."""

    type: str
    audio: AudioForm | UnsetType | None = UNSET
    truncation: str | RetentionRatioForm | UnsetType | None = UNSET
    resumable: bool | UnsetType | None = UNSET
    model: Name | None = None
    include: list[str] | UnsetType | None = UNSET
    tracing: Literal["auto"] | TracingForm | None = None
    object: Ignored = None
    id: Ignored = None
    expires_at: Ignored = None


class ContentForm(Strict):
    type: str
    text: NullableStr = None
    audio: NullableStr = None
    transcript: NullableStr = None
    image_url: NullableStr = None
    detail: Detail | None = None


class _ItemForm(Strict, kw_only=True):
    """object, status: no effect; sent by clients that repeat an item."""

    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class MessageForm(_ItemForm, tag="message", kw_only=True):
    role: str
    content: list[ContentForm]


class FunctionCallForm(_ItemForm, tag="function_call", kw_only=True):
    name: str
    arguments: str
    call_id: Name | None = None


class FunctionCallOutputForm(_ItemForm, tag="function_call_output", kw_only=True):
    call_id: Name
    output: str


class ItemReference(Strict, tag="item_reference"):
    id: Name


ItemForm = MessageForm | FunctionCallForm | FunctionCallOutputForm


class ResponseForm(_Settings):
    audio: ResponseAudioForm | UnsetType | None = UNSET
    conversation: NullableStr = None
    input: list[ItemForm | ItemReference] | None = None
    metadata: dict[str, str] | None = None


class ClientEvent(Strict):
    event_id: Name | None = None


class SessionUpdate(ClientEvent, tag="session.update", kw_only=True):
    session: SessionForm


class AudioAppend(ClientEvent, tag="input_audio_buffer.append", kw_only=True):
    audio: str


class AudioCommit(ClientEvent, tag="input_audio_buffer.commit"):
    pass


class AudioClear(ClientEvent, tag="input_audio_buffer.clear"):
    pass


class OutputAudioClear(ClientEvent, tag="output_audio_buffer.clear"):
    pass


class ItemCreate(ClientEvent, tag="conversation.item.create", kw_only=True):
    item: ItemForm
    previous_item_id: Name | None = None


class ItemDelete(ClientEvent, tag="conversation.item.delete", kw_only=True):
    item_id: Name


class ItemRetrieve(ClientEvent, tag="conversation.item.retrieve", kw_only=True):
    item_id: Name


class ItemTruncate(ClientEvent, tag="conversation.item.truncate", kw_only=True):
    item_id: Name
    content_index: int
    audio_end_ms: WholeNumber


class PlaybackAck(ClientEvent, tag="playback.ack", kw_only=True):
    """Extension of the protocol: the client has played audio_end_ms of this item's audio."""

    item_id: Name
    # At most one day, far beyond any item.
    audio_end_ms: Annotated[float, Meta(ge=0, le=86_400_000, multiple_of=1)]


class ResponseCreate(ClientEvent, tag="response.create"):
    response: ResponseForm | None = None


class ResponseCancel(ClientEvent, tag="response.cancel"):
    response_id: Name | None = None


AnyClientEvent = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | OutputAudioClear
    | ItemCreate
    | ItemDelete
    | ItemRetrieve
    | ItemTruncate
    | PlaybackAck
    | ResponseCreate
    | ResponseCancel
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
        if error.param != "type":
            raise
        kind = _envelope(frame).type
        known = ga_event(kind) if isinstance(kind, str) else None
        if known is None:
            raise
        raise ClientEventError(
            f"Unknown event '{cut(kind)}'. The protocol has '{known}'.", param="type"
        ) from None


def event_id_of(frame: str) -> str | None:
    """The client's event_id in a frame that parse_client_event refused, if it can be read."""
    event_id = _envelope(frame).event_id
    if not isinstance(event_id, str) or len(event_id) > MAX_NAME:
        return None
    return None if any("\ud800" <= c <= "\udfff" for c in event_id) else event_id


def _envelope(frame: str) -> _Envelope:
    try:
        return _envelope_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        event = loosely_read(frame)  # it may hold half surrogate pairs, which the decoder refuses
        event = event if isinstance(event, dict) else {}
        return _Envelope(event.get("type"), event.get("event_id"))
