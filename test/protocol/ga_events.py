"""Client events that OpenAI's own types allow: each optional key once, each choice once.

In: the installed `openai` package. Out: events, as JSON. As a program it prints one event per line,
so that the types of another environment's package can be used.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal, Required, Union, get_args, get_origin

from openai.types.realtime.client_secret_create_params import ClientSecretCreateParams
from openai.types.realtime.realtime_client_event_param import RealtimeClientEventParam
from typing_extensions import get_type_hints, is_typeddict

CALL_ID = "call_of_ga_events"
_SILENCE = "AAAA" * 2400  # 150 ms of PCM
# Values by key. They are no defaults, so that they have an effect if their field has one. Other
# text fields may have any value.
_TEXTS = {
    "audio": _SILENCE,
    "call_id": CALL_ID,
    "arguments": '{"town": "Rome"}',
    "name": "weather",
    "conversation": "none",
    "previous_item_id": "root",
}
_NUMBERS = {
    "idle_timeout_ms": 5000,
    "prefix_padding_ms": 200,
    "post_instructions": 1000,
    "max_output_tokens": 100,
    "seconds": 600,
    "audio_end_ms": 0,
    "content_index": 0,
}
_FRACTIONS = {"speed": 1.2, "retention_ratio": 0.5, "threshold": 0.6, "strength": 0.5}
# The protocol requires these; the types do not.
_NEEDED = {
    "input_text": ("text",),
    "output_text": ("text",),
    "input_audio": ("audio",),
    "input_image": ("image_url",),
    "function": ("name",),
}
_FREE = {"type": "object", "properties": {"town": {"type": "string"}}}


def events() -> Iterator[dict[str, Any]]:
    yield from _values(RealtimeClientEventParam, "event")


def client_secret_requests() -> Iterator[dict[str, Any]]:
    yield from _values(ClientSecretCreateParams, "request")


def _values(kind: Any, key: str) -> Iterator[Any]:
    """Values of a type, the simplest first."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        yield from _objects(kind)
    elif origin is Required:
        yield from _values(arguments[0], key)
    elif origin is Literal:
        yield from arguments
    elif arguments and (origin is Union or type(kind).__name__ == "UnionType"):
        for part in arguments:
            yield from _values(part, key)
    elif kind is type(None):
        yield None
    elif kind is str:
        yield _TEXTS.get(key, f"some_{key}")
    elif kind is bool:
        yield True
        yield False
    elif kind is int:
        yield _NUMBERS.get(key, 300)
    elif kind is float:
        yield _FRACTIONS[key]
    elif kind is object:
        yield _FREE
    elif arguments and str(origin).endswith("dict'>"):
        for value in _values(arguments[1], key):
            yield {"some_key": value}
    else:  # a list type of any name
        assert len(arguments) == 1, kind
        for value in _values(arguments[0], key):
            yield [value]


def _objects(kind: Any) -> Iterator[dict[str, Any]]:
    """The minimal object, then one per optional key and per other value of a key."""
    hints = get_type_hints(kind, include_extras=True)
    required = [key for key, hint in hints.items() if get_origin(hint) is Required]
    if "type" in hints and "type" not in required:
        required.append("type")
    least = _with_needed({key: next(_values(hints[key], key)) for key in required}, hints)
    yield least
    for key, hint in hints.items():
        for value in _values(hint, key):
            if least.get(key) != value:
                yield _with_needed({**least, key: value}, hints)


def _with_needed(value: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    keys = [key for key in _NEEDED.get(value.get("type"), ()) if key in hints]
    return {key: next(_values(hints[key], key)) for key in keys} | value


if __name__ == "__main__":
    for event in events():
        print(json.dumps(event))
