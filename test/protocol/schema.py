"""Server events checked against the types of OpenAI's own Python client.

Frame mode and voices over a response are extensions: clients that do not configure them get none of
their events.
"""

import copy
from typing import Any, Literal, get_args

from openai.types.realtime import RealtimeServerEvent
from pydantic import BaseModel


class _FrameDone(BaseModel, extra="forbid"):
    type: Literal["frame.done"]
    event_id: str
    frame_index: int
    audio_start_ms: int
    audio_end_ms: int
    missing_before: int
    outcome: Literal["on_time", "late", "empty", "dropped"]
    text: str
    output_tokens: int
    latency_ms: float | None
    error: dict[str, Any] | None


class _VoiceSuspected(BaseModel, extra="forbid"):
    type: Literal["input_audio_buffer.voice_suspected"]
    event_id: str
    audio_start_ms: int


class _VoiceIgnored(BaseModel, extra="forbid"):
    type: Literal["input_audio_buffer.voice_ignored"]
    event_id: str
    decision: Literal["backchannel", "noise", "other_voice", "undecided"]
    reason: Literal["short", "far", "limit", "withdrawn"]
    audio_start_ms: int
    audio_end_ms: int


class _Resumed(BaseModel, extra="forbid"):
    type: Literal["session.resumed"]
    event_id: str
    session: dict[str, Any]
    events_received: int
    items: list[str] | None = None  # at another server


_EXTENSIONS = {
    "session.resumed": _Resumed,
    "frame.done": _FrameDone,
    "input_audio_buffer.voice_suspected": _VoiceSuspected,
    "input_audio_buffer.voice_ignored": _VoiceIgnored,
}
_MODELS = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(RealtimeServerEvent)[0])
    if hasattr(model, "model_fields")
} | _EXTENSIONS


def check(event: dict[str, Any]) -> None:
    """Raise an error if the client's strict parser refuses this event or has no type for it."""
    assert event["event_id"]
    _MODELS[event["type"]].model_validate(_as_typed(event))


def _as_typed(event: dict[str, Any]) -> dict[str, Any]:
    """The event without what no types have, or only newer ones."""
    if event["type"] not in ("session.created", "session.updated"):
        return event
    event = copy.deepcopy(event)
    heard = event["session"]["audio"]["input"]
    if heard["turn_detection"] and heard["turn_detection"]["type"] == "frames":
        assert heard["turn_detection"].keys() == {"type", "frame_ms", "max_tokens"}
        heard["turn_detection"] = None
    if (heard["transcription"] or {}).get("model"):
        # A name that a client has sent, of any version of the types.
        heard["transcription"]["model"] = "whisper-1"
    return event
