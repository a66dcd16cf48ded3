"""Claims about malformed events: one error each, and the session goes on."""

import base64
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_live.errors import LiveError
from sglang_live.gateway.live.events import event_id_of, parse_client_event
from test.unit.gateway.live.world import AUDIO, LiveWorld, errors

APPEND = "session.input_audio.append"
THINK = "session.thinking.append"
FIXTURE = "session.output_audio.fixture.play"
# Event, code, param.
MALFORMED = [
    ({"type": APPEND}, "missing_required_parameter", "audio"),
    ({"type": APPEND, "audio": None}, "invalid_type", "audio"),
    ({"type": APPEND, "audio": 1}, "invalid_type", "audio"),
    ({"type": APPEND, "audio": "%%%"}, "invalid_audio", "audio"),
    ({"type": APPEND, "audio": "AAAA"}, "invalid_audio", "audio"),  # three bytes
    ({"type": APPEND, "audio": "", "format": "x"}, "unknown_parameter", "format"),
    ({"type": APPEND, "audio": "", "event_id": 7}, "invalid_type", "event_id"),
    ({"type": "session.input_audio.mute", "muted": True}, "unknown_parameter", "muted"),
    ({"type": "session.input_audio.commit"}, "invalid_value", "type"),
    ({"type": "response.cancel"}, "invalid_value", "type"),
    ({"type": 3}, "invalid_value", "type"),
    ({}, "missing_required_parameter", "type"),
    ({"type": THINK, "content": "x"}, "missing_required_parameter", "delegation_id"),
    ({"type": THINK, "delegation_id": None}, "missing_required_parameter", "content"),
    ({"type": THINK, "content": None, "delegation_id": None}, "invalid_type", "content"),
    ({"type": THINK, "content": ["x"], "delegation_id": None}, "invalid_type", "content"),
    ({"type": THINK, "content": "x" * 8001, "delegation_id": None}, "invalid_value", "content"),
    ({"type": THINK, "content": "x", "delegation_id": 1}, "invalid_type", "delegation_id"),
    ({"type": THINK, "content": "x", "delegation_id": "no"}, "invalid_value", "delegation_id"),
    (
        {"type": "session.commentary.append", "content": "x", "delegation_id": "no"},
        "invalid_value",
        "delegation_id",
    ),
    (
        {"type": "session.instructions.append", "content": "x", "delegation_id": "no"},
        "invalid_value",
        "delegation_id",
    ),
    ({"type": FIXTURE}, "missing_required_parameter", "audio"),
    ({"type": FIXTURE, "audio": ""}, "invalid_audio", "audio"),
    ({"type": FIXTURE, "audio": "AAAA"}, "invalid_audio", "audio"),
    (
        {"type": FIXTURE, "audio": base64.b64encode(b"RIFF" + bytes(96)).decode()},
        "invalid_audio",
        "audio",
    ),
    (
        {"type": FIXTURE, "audio": base64.b64encode(bytes(48_000 * 30 + 2)).decode()},
        "invalid_audio",
        "audio",
    ),
    ({"type": "session.update"}, "missing_required_parameter", "session"),
    ({"type": "session.update", "session": None}, "invalid_type", "session"),
    ({"type": "session.update", "session": []}, "invalid_type", "session"),
    (
        {"type": "session.update", "session": {"delegation": {}}},
        "missing_required_parameter",
        "session.delegation.type",
    ),
    (
        {
            "type": "session.update",
            "session": {"delegation": {"type": "client", "acknowledgement_delay_ms": -1}},
        },
        "invalid_value",
        "session.delegation.acknowledgement_delay_ms",
    ),
    ({"type": "session.start"}, "missing_required_parameter", "session"),
    (
        {"type": "session.start", "session": {"model": "fake-omni"}},
        "session_already_started",
        None,
    ),
    ({"type": "session.close", "reason": "x"}, "unknown_parameter", "reason"),
    ({"type": "response.create"}, "unsupported_event", "type"),
    ({"type": "response.create", "response": {}}, "unknown_parameter", "response"),
    (
        {"type": "response.item.create", "item": {"type": "message"}},
        "unsupported_event",
        "type",
    ),
    ({"type": "response.item.create"}, "missing_required_parameter", "item"),
    ({"type": "decision.create", "event_id": "d"}, "unsupported_event", "type"),
    ({"type": "decision.create"}, "missing_required_parameter", "event_id"),
    ({"type": "decision.item.create", "item": {}}, "unsupported_event", "type"),
    ({"type": "decision.item.delete", "item_id": "i"}, "unsupported_event", "type"),
    ({"type": "transport.dtmf.send", "event": "1"}, "unsupported_event", "type"),
]


async def test_malformed_events_get_one_error_each_and_the_session_goes_on():
    world = LiveWorld()
    async with world.connect() as client:
        for event, code, param in MALFORMED:
            sent = event if event.get("type") == "decision.create" else {"event_id": "e", **event}
            client.send_raw(json.dumps(sent))
            await client.rest()
            [error] = errors(client.events)
            assert (error["code"], error.get("param")) == (code, param), event
            event_id = sent.get("event_id")
            known = event_id if isinstance(event_id, str) else None
            assert error.get("client_event_id") == known, event
            client.events.clear()
        for frame, code in (
            ("{", "invalid_json"),
            ("[]", "invalid_event"),
            (b"x", "invalid_event"),
        ):
            client.send_raw(frame)
            await client.rest()
            [error] = errors(client.events)
            assert error["code"] == code and "client_event_id" not in error
            client.events.clear()
        assert len(await client.ticks(5)) == 5


async def test_an_unknown_event_lists_those_that_are_supported():
    world = LiveWorld()
    async with world.connect() as client:
        client.send("session.input_audio.clear")
        await client.rest()
        [error] = errors(client.events)
        assert "session.commentary.append" in error["message"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
KNOWN = [event for event, _, _ in MALFORMED if isinstance(event.get("type"), str)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(KNOWN), st.text(max_size=6), VALUES)
def test_any_event_is_read_or_refused(event, name, value):
    frame = json.dumps({**event, name: value})
    event_id_of(frame)
    try:
        parse_client_event(frame)
    except LiveError as error:
        assert str(error)


async def test_audio_of_every_size_is_heard():
    world = LiveWorld()
    async with world.connect() as client:
        for n in (0, 2, 4, 100, 4800, 9602):
            client.append(bytes(n))
        await client.ticks(3)
        assert not errors(client.events) and len(client.of(AUDIO)) == 4
