"""Client events that a server must refuse with one error each, without a change of state.

All are for a fresh session without turn detection, response, audio or items.
"""

import base64
from typing import Any

Event = dict[str, Any]

_NO_TEXT = (7, True, ["x"], {"x": 1})
_NO_OBJECT = ("x", 7, ["x"])
_NO_COUNT = ("x", 1.5, [1], None)
_ODD = base64.b64encode(b"abc").decode()
_TEXT = {"type": "input_text", "text": "Hello."}


def _with(kind: str, field: str, values, **others: Any) -> list[Event]:
    return [{"type": kind, **others, field: value} for value in values]


def _types() -> list[Event]:
    beta = ("response.audio.delta", "conversation.item.created", "transcription_session.update")
    unknown = ("", "session", "session.create", "SESSION.UPDATE", "input_audio_buffer", *beta)
    return [{}, *({"type": kind} for kind in unknown), *({"type": x} for x in (*_NO_TEXT, None))]


def _audio() -> list[Event]:
    append = "input_audio_buffer.append"
    no_audio = (*_NO_TEXT, None, "not base64!", "AAA", _ODD, "ÄÖÜ=")
    return [
        {"type": append},
        *_with(append, "audio", no_audio),
        {"type": "input_audio_buffer.commit"},
        # Events of WebRTC and SIP only.
        {"type": "output_audio_buffer.clear"},
    ]


def _items() -> list[Event]:
    create = "conversation.item.create"
    message = {"type": "message", "role": "user", "content": [_TEXT]}
    contents = (
        "Hello.",
        7,
        [7],
        [{}],
        [{"type": "input_smell"}],
        [{"type": "input_text"}],
        [{"type": "input_text", "text": 7}],
        [{"type": "input_audio"}],
        [{"type": "input_audio", "audio": 7}],
        [{"type": "input_audio", "audio": "not base64!"}],
        [{"type": "input_audio", "audio": _ODD}],
        [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
        [{"type": "output_text", "text": "of the assistant alone"}],
        [_TEXT, {"type": "input_text"}],
    )
    items = (
        *_NO_OBJECT,
        {},
        {"type": "letter"},
        {"type": "message"},
        {"type": "message", "content": [_TEXT]},
        {"type": "message", "role": "user"},
        *({**message, "role": role} for role in ("narrator", 7, None)),
        *({**message, "content": content} for content in contents),
        {**message, "role": "system", "content": [{"type": "input_audio", "audio": "AAAA"}]},
        {**message, "role": "assistant"},
        *({**message, "id": value} for value in _NO_TEXT),
        {"type": "function_call", "arguments": "{}"},
        {"type": "function_call", "name": "weather"},
        {"type": "function_call", "name": 7, "arguments": "{}"},
        {"type": "function_call_output", "output": "fine"},
        {"type": "function_call_output", "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": {"is": "fine"}},
    )
    return [
        {"type": create},
        *_with(create, "item", items),
        *_with(create, "previous_item_id", (*_NO_TEXT, "unknown"), item=message),
    ]


def _named_items() -> list[Event]:
    events: list[Event] = []
    cut = {"content_index": 0, "audio_end_ms": 100}
    for verb, others in (("delete", {}), ("retrieve", {}), ("truncate", cut)):
        kind = f"conversation.item.{verb}"
        events.append({"type": kind, **others})
        events += _with(kind, "item_id", (*_NO_TEXT, "unknown"), **others)
    for field in cut:
        others = {"item_id": "unknown", **{k: v for k, v in cut.items() if k != field}}
        events.append({"type": kind, **others})
        events += _with(kind, field, _NO_COUNT, **others)
    ack = {"item_id": "unknown"}
    return [
        *events,
        {"type": "playback.ack", **ack},
        *_with("playback.ack", "audio_end_ms", (*_NO_COUNT, -1, 10**9), **ack),
    ]


def _settings() -> list[Event]:
    """Settings common to session.update and response.create."""
    function = {"type": "function", "name": "weather"}
    formats = (7, {}, {"type": "audio/mp3"}, {"type": "audio/pcm", "rate": 16_000})
    return [
        *({"output_modalities": x} for x in ("audio", 7, ["smell"], ["audio", "text"], [7])),
        *({"instructions": x} for x in _NO_TEXT),
        *({"max_output_tokens": x} for x in (0, -1, 10**6, "many", 1.5, [1])),
        *({"temperature": x} for x in (-1, 3, "hot")),
        *({"tools": x} for x in ("weather", [7], [{}], [{"type": "function"}])),
        {"tools": [{"type": "mcp", "server_label": "x"}]},
        {"tools": [{**function, "name": 7}]},
        {"tools": [{**function, "description": 7}]},
        {"tools": [{**function, "parameters": {"type": "nothing"}}]},
        *({"tool_choice": x} for x in ("maybe", {"type": "function"}, ["auto"], 7)),
        *({"audio": x} for x in _NO_OBJECT),
        *({"audio": {"output": x}} for x in _NO_OBJECT),
        *({"audio": {"output": {"format": x}}} for x in formats),
        *({"audio": {"output": {"voice": x}}} for x in (7, ["ada"], {"name": "ada"})),
    ]


def _sessions() -> list[Event]:
    update = "session.update"
    detections = (
        "server_vad",
        7,
        {"type": "telepathy"},
        *({"type": "server_vad", "threshold": x} for x in (-0.1, 1.1, "x")),
        *({"type": "server_vad", "silence_duration_ms": x} for x in (-1, "long", 10**9)),
        *({"type": "server_vad", "prefix_padding_ms": x} for x in (-1, "long", 10**9)),
        *({"type": "server_vad", "idle_timeout_ms": x} for x in (-1, "long")),
        {"type": "server_vad", "create_response": "yes"},
        {"type": "server_vad", "interrupt_response": 1},
        {"type": "semantic_vad", "eagerness": "keen"},
    )
    inputs = (
        *_NO_OBJECT,
        *({"turn_detection": x} for x in detections),
        {"format": {"type": "audio/pcm", "rate": 44_100}},
        {"format": {"type": "audio/opus"}},
        {"transcription": 7},
        {"transcription": {"model": 7}},
    )
    truncations = (
        7,
        "never",
        {"type": "retention_ratio"},
        *({"type": "retention_ratio", "retention_ratio": x} for x in (0, 1.5, "half")),
        {
            "type": "retention_ratio",
            "retention_ratio": 0.5,
            "token_limits": {"post_instructions": 1},
        },
    )
    sessions = (
        *({"type": x} for x in ("transcription", "dream", 7)),
        *({"type": "realtime", **change} for change in _settings()),
        *({"type": "realtime", "audio": {"input": x}} for x in inputs),
        *({"type": "realtime", "truncation": x} for x in truncations),
        {"type": "realtime", "audio": {"output": {"speed": 9}}},
        {"instructions": "of no type"},
    )
    return [{"type": update}, *_with(update, "session", (*_NO_OBJECT, *sessions))]


def _responses() -> list[Event]:
    create = "response.create"
    responses = (
        *_NO_OBJECT,
        *_settings(),
        *({"conversation": x} for x in (7, "elsewhere")),
        *({"input": x} for x in ("Hello.", [7], [{}], [{"type": "letter"}])),
        {"input": [{"type": "item_reference", "id": "unknown"}]},
        {"input": [{"type": "item_reference"}]},
        *({"metadata": x} for x in ("x", ["x"], {"x": 1})),
    )
    return [
        *_with(create, "response", responses),
        {"type": "response.cancel"},
        {"type": "response.cancel", "response_id": "unknown"},
        *_with("response.cancel", "response_id", _NO_TEXT),
    ]


def malformed_events() -> list[Event]:
    """Each with an event_id of its own."""
    events = [*_types(), *_audio(), *_items(), *_named_items(), *_sessions(), *_responses()]
    return [{**event, "event_id": f"bad_{n}"} for n, event in enumerate(events)]
