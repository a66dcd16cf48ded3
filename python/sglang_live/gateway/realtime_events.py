"""Client events of the Realtime protocol: their shape, and how a frame becomes one.

In: a text frame. Out: one of the protocol's eleven events or our own playback.ack, or
ClientEventError.
UNSET is a key the client did not send, None an explicit null. Unknown keys are ignored, so
that clients of tomorrow keep working.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sglang_live.gateway.event_error import ClientEventError

# What is told back, in answers or in errors, must not fill what a client has yet to read.
MAX_ID, MAX_NAME, MAX_HINT = 128, 512, 16_384
NullableStr = str | None
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
# Of things that are looked up, and of what others named: an empty one is just not found.
Name = Annotated[str, Meta(max_length=MAX_NAME)]

# Some clients divide before they send: 12.0 is a number of milliseconds like 12.
WholeNumber = Annotated[float, Meta(multiple_of=1)]


class FormatForm(Struct):
    type: str
    rate: int | UnsetType | None = UNSET


class TurnDetectionForm(Struct):
    type: str | UnsetType | None = UNSET
    threshold: Annotated[float, Meta(ge=0, le=1)] | UnsetType | None = UNSET
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=30_000)] | UnsetType | None = UNSET
    silence_duration_ms: Annotated[int, Meta(ge=0, le=60_000)] | UnsetType | None = UNSET
    idle_timeout_ms: Annotated[int, Meta(ge=1_000, le=600_000)] | UnsetType | None = UNSET
    eagerness: str | UnsetType | None = UNSET
    create_response: bool | UnsetType | None = UNSET
    interrupt_response: bool | UnsetType | None = UNSET
    confirm_ms: Annotated[int, Meta(ge=0, le=2_000)] | UnsetType | None = UNSET
    frame_ms: Annotated[int, Meta(ge=80, le=2_000, multiple_of=80)] | UnsetType | None = UNSET
    max_tokens: Annotated[int, Meta(ge=1, le=64)] | UnsetType | None = UNSET


class TranscriptionForm(Struct):
    model: NullableStr = None
    language: Name | None = None
    prompt: Annotated[str, Meta(max_length=MAX_HINT)] | None = None


class VoiceRef(Struct):
    id: Name


def voice_name(voice: str | VoiceRef | None) -> str | None:
    return voice.id if isinstance(voice, VoiceRef) else voice


class AudioInputForm(Struct):
    format: FormatForm | UnsetType | None = UNSET
    transcription: TranscriptionForm | UnsetType | None = UNSET
    turn_detection: TurnDetectionForm | UnsetType | None = UNSET


class AudioOutputForm(Struct):
    format: FormatForm | UnsetType | None = UNSET
    voice: Name | VoiceRef | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] | UnsetType | None = UNSET


class AudioForm(Struct):
    input: AudioInputForm | UnsetType | None = UNSET
    output: AudioOutputForm | UnsetType | None = UNSET


# Five seconds of audio: with less, a session forgets what it was just asked. A million is beyond
# any context, and still a number that stages can hold.
_LimitTokens = Annotated[int, Meta(ge=64, le=1_000_000)]


class TokenLimitsForm(Struct):
    post_instructions: _LimitTokens | None = None


class RetentionRatioForm(Struct):
    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Meta(gt=0, le=1)]
    token_limits: TokenLimitsForm | None = None


class _Settings(Struct):
    """What session.update and response.create have in common."""

    output_modalities: list[str] | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    tools: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_choice: str | dict[str, Any] | UnsetType | None = UNSET
    max_output_tokens: int | str | UnsetType | None = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    audio: AudioForm | UnsetType | None = UNSET


class SessionForm(_Settings, kw_only=True):
    type: str
    truncation: str | RetentionRatioForm | UnsetType | None = UNSET


class ContentForm(Struct):
    type: str
    text: NullableStr = None
    audio: NullableStr = None
    transcript: NullableStr = None


class MessageForm(Struct, tag="message"):
    role: str
    content: list[ContentForm]
    id: Id | None = None


class FunctionCallForm(Struct, tag="function_call"):
    name: str
    arguments: str
    call_id: Name | None = None
    id: Id | None = None


class FunctionCallOutputForm(Struct, tag="function_call_output"):
    call_id: Name
    output: str
    id: Id | None = None


class ItemReference(Struct, tag="item_reference"):
    id: Name


ItemForm = MessageForm | FunctionCallForm | FunctionCallOutputForm


class ResponseForm(_Settings):
    conversation: NullableStr = None
    input: list[ItemForm | ItemReference] | None = None
    metadata: dict[str, str] | None = None


class ClientEvent(Struct):
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
    """Our extension: audio_end_ms of this item's audio were played so far."""

    item_id: Name
    # A day: beyond it numbers stop being times.
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


class _Envelope(Struct):
    event_id: Any = None


_decoder = msgspec.json.Decoder(AnyClientEvent)
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


def parse_client_event(frame: str) -> AnyClientEvent:
    """Read one text frame.

    Raises:
        ClientEventError: not JSON, not an event, or a field that is missing or wrong; `param`
            is the path of that field.
    """
    try:
        return _decoder.decode(frame)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ClientEventError(f"Invalid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ClientEventError("JSON nested too deeply.", code="invalid_json") from None


def event_id_of(frame: str) -> str | None:
    """The client's event_id in a frame that parse_client_event refused, if it can be read."""
    try:
        event_id = _envelope_decoder.decode(frame).event_id
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return event_id if isinstance(event_id, str) and len(event_id) <= MAX_NAME else None


def _explain(message: str) -> ClientEventError:
    """Turn msgspec's "Expected `str`, got `int` - at `$.audio`" into a protocol error."""
    what, found, path = message.rpartition(" - at `$")  # it may quote all of a frame
    if not found:
        what, path = message, ""
    path = path.removesuffix("`").removeprefix(".")
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing['name']}".lstrip(".")
        return ClientEventError(
            f"Missing required parameter: '{path}'.",
            code="missing_required_parameter",
            param=path,
        )
    code = "invalid_type" if ", got `" in what else "invalid_value"
    if not path:
        return ClientEventError(f"Not a client event: {what}.", code="invalid_event")
    return ClientEventError(f"{what} at '{path}'.", code=code, param=path)
