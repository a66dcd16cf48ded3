"""Server events of OpenAI's Live API, strictly: their fields as openai-python 3.54 types them."""

import base64
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Event(_Strict):
    event_id: str
    client_event_id: str | None = None


class _Format(_Strict):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate: Literal[8_000, 16_000, 24_000]


class _CustomVoice(_Strict):
    id: str


class _Output(_Strict):
    voice: str | _CustomVoice


class _Audio(_Strict):
    """format: of a WebSocket alone."""

    format: _Format | None = None
    output: _Output


class _Responses(_Strict):
    model: str
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_output_tokens: int | None


class _Decisions(_Strict):
    model: str
    questions: list[dict[str, Any]]


class _Delegation(_Strict):
    type: Literal["client", "responses", "decisions"]
    responses: _Responses | None = None
    decisions: _Decisions | None = None
    acknowledgement_delay_ms: int


class _Text(_Strict):
    type: Literal["input_text", "output_text"]
    text: str


class _Message(_Strict):
    type: Literal["message"]
    role: Literal["developer", "user", "assistant"]
    content: list[_Text]


class _Session(_Strict):
    id: str
    expires_at: int
    model: str
    status: Literal["active"]
    audio: _Audio
    delegation: _Delegation
    input: list[_Message]
    instructions: str | None
    safety_identifier: str | None
    store: bool
    triggers: list[Any]


class _OfSession(_Event):
    type: Literal["session.started", "session.updated"]
    session: _Session


class _Plain(_Event):
    type: Literal[
        "session.input_audio.muted",
        "session.input_audio.unmuted",
        "session.output_audio.fixture.playing",
        "session.output_audio.fixture.played",
    ]


class _AudioDelta(_Strict):
    type: Literal["session.output_audio.delta"]
    delta: str
    start_ms: int | None = None
    end_ms: int | None = None


class _Reflected(_Strict):
    type: Literal["session.input_audio.append"]
    audio: str


class _Transcript(_Event):
    type: Literal["session.input_transcript.delta", "session.output_transcript.delta"]
    delta: str
    start_ms: int
    end_ms: int


class _Appended(_Event):
    type: Literal[
        "session.instructions.appended", "session.thinking.appended", "session.commentary.appended"
    ]
    start_ms: int
    end_ms: int


class _Delegated(_Strict):
    id: str
    type: Literal["delegation"]
    target: Literal["client", "responses", "decisions"]
    response_id: str | None = None


class _DelegationCreated(_Event):
    type: Literal["session.delegation.created"]
    delegation: _Delegated
    offset_ms: int


class _Usage(_Strict):
    seconds: float


class _UsageUpdated(_Event):
    type: Literal["session.usage.updated"]
    usage: _Usage


class _Closed(_Event):
    type: Literal["session.closed"]
    reason: Literal["close_requested", "expired", "content", "remote_hangup", "connection_lost"]
    session: _Session
    usage: _Usage


class _ResponseEvent(_Event):
    type: Literal["response.event"]
    delegation_id: str | None = None
    event: dict[str, Any]


class _Predicate(_Strict):
    type: Literal["predicate"]
    name: str | None
    probability: float


class _Weighed(_Strict):
    value: str | bool
    probability: float


class _Choice(_Strict):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[_Weighed]


class _Level(_Strict):
    label: str
    value: int
    probability: float


class _Score(_Strict):
    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[_Level]


class _Decision(_Strict):
    answers: list[_Predicate | _Choice | _Score]
    model: str
    usage: dict[str, Any]


class _Decided(_Strict):
    type: Literal["decision.completed"]
    decision: _Decision


class _DecisionEvent(_Event):
    type: Literal["decision.event"]
    delegation_id: str | None = None
    event: _Decided


class _DecisionItem(_Event):
    type: Literal["decision.item.created"]
    item: dict[str, Any]


class _DecisionItemDeleted(_Event):
    type: Literal["decision.item.deleted"]
    item_id: str


class _ErrorBody(_Strict):
    type: str
    code: str
    message: str
    param: str | None = None
    client_event_id: str | None = None


class _Error(_Event):
    type: Literal["error"]
    error: _ErrorBody


_EVENT: TypeAdapter[Any] = TypeAdapter(
    _OfSession
    | _Plain
    | _AudioDelta
    | _Reflected
    | _Transcript
    | _Appended
    | _DelegationCreated
    | _UsageUpdated
    | _Closed
    | _ResponseEvent
    | _DecisionEvent
    | _DecisionItem
    | _DecisionItemDeleted
    | _Error
)


class LiveEvents:
    """Checks the events of one connection, in order.

    Raises AssertionError or ValidationError.
    """

    def __init__(self, *, is_sideband: bool = False) -> None:
        self._is_sideband = is_sideband
        self._ids: set[str] = set()
        self._starts = {"session.input_transcript.delta": 0, "session.output_transcript.delta": 0}
        self._session: dict[str, Any] | None = None
        self._is_closed = False
        self._n_nested = 0
        self._response: str | None = None  # that runs

    def see(self, event: dict[str, Any]) -> None:
        assert all(value is not None for name, value in event.items())
        _EVENT.validate_python(event)
        kind = event["type"]
        assert not self._is_closed, f"{kind} after session.closed"
        if "event_id" in event:
            assert event["event_id"] not in self._ids
            self._ids.add(event["event_id"])
        if kind == "session.started":
            assert self._session is None
            self._session = event["session"]
        elif kind != "error":
            assert self._session is not None, f"{kind} before session.started"
        assert self._is_sideband or kind != "session.input_audio.append"
        if kind == "session.output_audio.delta":
            assert ("start_ms" in event) == ("end_ms" in event) == self._is_sideband
        if kind == "response.event":
            self._see_nested(event["event"])
        if kind in self._starts:
            assert event["delta"]
            assert self._starts[kind] <= event["start_ms"] <= event["end_ms"]
            self._starts[kind] = event["start_ms"]
        elif kind == "session.output_audio.delta":
            assert self._session is not None
            # Over WebRTC, sidebands have PCM.
            form = self._session["audio"].get("format") or {"type": "audio/pcm", "rate": 24_000}
            size = 2 if form["type"] == "audio/pcm" else 1
            assert len(base64.b64decode(event["delta"])) == form["rate"] * size // 10
        elif kind == "session.closed":
            assert event["session"]["id"] == self._session["id"]
            self._is_closed = True

    def _see_nested(self, event: dict[str, Any]) -> None:
        """Of a Responses stream: one response after another, all of them in order."""
        assert event["sequence_number"] == self._n_nested
        self._n_nested += 1
        kind = event["type"]
        if "response" in event:
            response = event["response"]
            assert response["output"] == [] and response["tools"] == []
            assert response["instructions"] is None and "input" not in response
        if kind == "response.created":
            assert self._response is None
            self._response = event["response"]["id"]
            return
        assert self._response is not None, kind
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            assert event["response"]["id"] == self._response
            assert (event["response"]["usage"] is None) == (kind == "response.failed")
            self._response = None
