"""Claims about the tier in SGLang's responses, however they are cut into pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st

from sglang_live.gateway.native.relay import TierEcho

EVENTS = (
    b': comment\n\ndata: {"id":"a","choices":[{"delta":{"content":"\\ndata: {"}}]}\n\n'
    b'data: {"id":"a","choices":[]}\r\n\r\ndata: {"error":{"message":"x"}}\n\ndata: [DONE]\n\n'
)
BODY = b' {"id": "a", "choices": [{"text": "{"}]}'


def echoed(data: bytes, cuts: list[int], streams: bool) -> bytes:
    echo, out, begin = TierEcho("flex", streams), b"", 0
    for end in [*sorted(cuts), len(data)]:
        out += echo.push(data[begin:end])
        begin = end
    return out + echo.finish()


def events_of(data: bytes) -> list[dict]:
    lines = (line.strip() for line in data.split(b"\n"))
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


@given(st.lists(st.integers(0, len(EVENTS)), max_size=20))
def test_every_event_names_the_tier_and_an_error_does_not(cuts):
    out = echoed(EVENTS, cuts, streams=True)
    first, second, error = events_of(out)
    assert first.pop("service_tier") == second.pop("service_tier") == "flex"
    assert [first, second, error] == events_of(EVENTS)
    assert out.startswith(b": comment\n\n") and out.endswith(b"\n\ndata: [DONE]\n\n")


@given(st.lists(st.integers(0, len(BODY)), max_size=10))
def test_an_object_names_the_tier(cuts):
    assert json.loads(echoed(BODY, cuts, streams=False)) == json.loads(BODY) | {
        "service_tier": "flex"
    }


def test_what_is_no_object_is_unchanged():
    assert echoed(b"[1]", [1], streams=False) == b"[1]"


def test_an_event_is_passed_on_when_it_is_complete():
    echo = TierEcho("default", streams=True)
    assert echo.push(b'data: {"a"') == b""
    assert echo.push(b":1}\n\n") == b'data: {"service_tier":"default","a":1}\n\n'
