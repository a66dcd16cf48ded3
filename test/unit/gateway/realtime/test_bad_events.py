"""Bad events: each gets exactly one error, changes nothing, and the connection stays open."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_live.gateway.call.turns.turn_taking import TurnTaking
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.realtime.events import parse_client_event
from test.protocol.malformed import malformed_events
from test.unit.gateway.fakes import FakeOrchestrator, connected, done, types
from test.unit.gateway.hostile import HOSTILE_SCHEMAS, schemas

DEEP = "[" * 50_000 + "]" * 50_000


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("nonsense", "invalid_json"),
        ('{"type": NaN}', "invalid_json"),
        ('{"type":"session.update","session":' + DEEP + "}", "invalid_type"),
        ('{"type":"response.cancel","extra":' + DEEP + "}", "invalid_json"),
        (DEEP, "invalid_event"),
        ("[]", "invalid_event"),
        ("7", "invalid_event"),
        ("{}", "missing_required_parameter"),
        ('{"type": "zzz"}', "invalid_value"),
        ('{"type": 3}', "invalid_value"),
        ('{"type": "response.audio.delta"}', "invalid_value"),
        ('{"type": "input_audio_buffer.append"}', "missing_required_parameter"),
        ('{"type": "output_audio_buffer.clear"}', "invalid_value"),
        (b"\x00\x01", "invalid_event"),
    ],
)
async def test_a_frame_that_is_not_an_event_is_one_error(frame, code):
    async with connected(FakeOrchestrator()) as client:
        client.send_raw(frame)
        events = await client.settle()
        assert types(events) == ["error"]
        assert events[0]["error"]["code"] == code
        assert events[0]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("frame", "event_id"),
    [
        ('{"type": "zzz", "event_id": "e1"}', "e1"),
        ('{"event_id": "e2", "type": "input_audio_buffer.append", "audio": 5}', "e2"),
        ('{"type": "zzz", "event_id": 7}', None),
        ('{"type": "zzz", "event_id": "e3"', None),
        ('["event_id"]', None),
    ],
)
async def test_errors_repeat_the_clients_event_id(frame, event_id):
    async with connected(FakeOrchestrator()) as client:
        client.send_raw(frame)
        assert (await client.expect("error"))["error"]["event_id"] == event_id


@pytest.mark.parametrize("event", malformed_events(), ids=json.dumps)
async def test_a_malformed_event_is_one_error_and_changes_nothing(event):
    async with connected(FakeOrchestrator()) as client:
        client.turn_detection(None)
        before = await client.find("session.updated")
        client.send_raw(json.dumps(event))
        client.send("session.update", session={"type": "realtime"})
        error, after = await client.expect("error"), await client.expect("session.updated")
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["event_id"] == event["event_id"]
        assert error["error"]["message"] and error["error"]["code"]
        assert after["session"] == before["session"]
        assert client.wire.outgoing.empty()


async def test_a_frame_beyond_the_limit_is_an_error_and_not_read():
    async with connected(FakeOrchestrator(), max_frame_bytes=4000, max_append_bytes=2000) as client:
        client.send("input_audio_buffer.append", audio="A" * 5000)
        error = (await client.expect("error"))["error"]
        assert error["code"] == "event_too_large"


async def test_a_bug_ends_one_event_and_not_the_session(monkeypatch, caplog):
    def crash(self):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(TurnTaking, "clear", crash)
    async with connected(FakeOrchestrator()) as client:
        client.send("input_audio_buffer.clear", event_id="e")
        events = await client.settle()
        assert types(events) == ["error"]
        assert events[0]["error"]["type"] == "server_error"
        assert events[0]["error"]["event_id"] == "e"
        assert "secret" not in events[0]["error"]["message"]
    assert "secret detail" in caplog.text


def json_values():
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    scalars = st.none() | st.booleans() | numbers | st.text()
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )


FIELDS = {
    "session.update": ["session"],
    "input_audio_buffer.append": ["audio"],
    "input_audio_buffer.commit": [],
    "input_audio_buffer.clear": [],
    "output_audio_buffer.clear": [],
    "conversation.item.create": ["item", "previous_item_id"],
    "conversation.item.delete": ["item_id"],
    "conversation.item.retrieve": ["item_id"],
    "conversation.item.truncate": ["item_id", "content_index", "audio_end_ms"],
    "response.create": ["response"],
    "response.cancel": ["response_id"],
}
# Events that report a change. One client event may have several; an error comes alone.
LIKELY_VALUES = st.sampled_from(
    [
        {"type": "realtime"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"conversation": "none"},
        "AAAA",
        "",
        "item_1",
        0,
        2**70,
        -1,
        1e308,
        "\ud83d\ude00\u0000",
    ]
)


@st.composite
def client_events(draw):
    kind = draw(st.sampled_from([*FIELDS, "unknown.event"]))
    event = {"type": kind, "event_id": draw(st.text(max_size=8) | st.none())}
    for name in FIELDS.get(kind, []):
        if draw(st.booleans()):
            event[name] = draw(LIKELY_VALUES | json_values())
    nested = event.get("session")
    if isinstance(nested, dict):
        keys = ["audio", "tools", "tool_choice", "truncation"]
        keys += ["max_output_tokens", "output_modalities"]
        nested = dict(nested)
        for name in draw(st.lists(st.sampled_from(keys), max_size=2)):
            nested[name] = draw(json_values())
        if draw(st.booleans()):
            parameters = draw(st.sampled_from(HOSTILE_SCHEMAS) | schemas())
            nested["tools"] = [{"type": "function", "name": "f", "parameters": parameters}]
        event["session"] = nested
    return event


@settings(max_examples=150, derandomize=True)
@given(st.lists(client_events(), min_size=1, max_size=6))
def test_random_events_get_an_error_or_their_result_and_the_connection_stays_open(events):
    async def talk():
        async with connected(FakeOrchestrator()) as client:
            for event in events:
                frame = json.dumps(event)
                client.send_raw(frame)
                client.send("conversation.item.retrieve", item_id="marker", event_id="marker")
                received = []
                while True:
                    got = await client.next()
                    if got["type"] == "error" and got["error"]["event_id"] == "marker":
                        break
                    received.append(got)
                errors = [a for a in received if a["type"] == "error"]
                assert len(errors) <= 1
                if is_refused(frame):
                    assert len(errors) == 1
                for error in errors:
                    assert error["error"]["type"] == "invalid_request_error", error
                    assert error["error"]["event_id"] == event["event_id"]

    asyncio.run(talk())


@settings(max_examples=60, derandomize=True)
@given(st.sampled_from(HOSTILE_SCHEMAS) | schemas(), json_values())
def test_with_any_parameters_a_function_call_is_sent_or_text(parameters, argument):
    """With any declared parameters, and any arguments that the model writes."""
    call = json.dumps({"name": "f", "arguments": {"x": argument}})

    async def talk():
        orchestrator = FakeOrchestrator([[done("", function_calls=(call,))]])
        async with connected(orchestrator) as client:
            client.update(tools=[{"type": "function", "name": "f", "parameters": parameters}])
            if (await client.next())["type"] == "error":
                return
            client.send("response.create")
            response = (await client.find("response.done"))["response"]
            assert response["status"] == "completed"
            [item] = response["output"]
            assert item["type"] == "function_call" or item["content"][0]["transcript"] == call

    asyncio.run(talk())


def is_refused(frame: str) -> bool:
    try:
        parse_client_event(frame)
    except ClientEventError:
        return True
    return False


@settings(max_examples=200, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.text() | st.binary(max_size=50).map(lambda raw: raw.decode("latin-1")))
def test_no_text_makes_the_parser_raise_another_error(frame):
    try:
        parse_client_event(frame)
    except ClientEventError as error:
        assert str(error)


HUGE = "x" * 400_000


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("conversation.item.delete", {"item_id": HUGE}),
        ("conversation.item.retrieve", {"item_id": HUGE}),
        ("conversation.item.truncate", {"item_id": HUGE, "content_index": 0, "audio_end_ms": 0}),
        ("playback.ack", {"item_id": HUGE, "audio_end_ms": 0}),
        ("response.cancel", {"response_id": HUGE}),
        ("input_audio_buffer.clear", {"event_id": HUGE}),
        (HUGE, {}),
        ("conversation.item.create", {"item": {"type": "function_call_output", "call_id": HUGE,
                                               "output": ""}}),
        ("conversation.item.create", {"item": {"type": "message", "role": HUGE, "content": []}}),
        ("conversation.item.create", {"previous_item_id": HUGE, "item": {
            "type": "message", "role": "user", "content": []}}),
        ("response.create", {"response": {"conversation": HUGE}}),
        ("response.create", {"response": {"input": [{"type": "item_reference", "id": HUGE}]}}),
        *(
            ("session.update", {"session": {"type": "realtime", **session}})
            for session in (
                {"type": HUGE},
                {"tool_choice": HUGE},
                {"tool_choice": {"type": "function", "name": HUGE}},
                {"output_modalities": [HUGE]},
                {"truncation": HUGE},
                {"audio": {"output": {"voice": HUGE}}},
                {"audio": {"output": {"voice": {"id": HUGE}}}},
                {"audio": {"output": {"format": {"type": HUGE}}}},
                {"audio": {"input": {"transcription": {"prompt": HUGE}}}},
                {"audio": {"input": {"transcription": {"language": HUGE}}}},
                {"audio": {"input": {"turn_detection": {"type": HUGE}}}},
            )
        ),
    ],
    ids=lambda part: str(part)[:60],
)  # fmt: skip
async def test_a_text_too_long_to_echo_is_one_short_error(kind, fields):
    async with connected(FakeOrchestrator(), send_buffer_bytes=300_000) as client:
        client.send(kind, **fields)
        [error] = await client.settle()
        assert error["error"]["type"] == "invalid_request_error"
        assert len(json.dumps(error)) < 4000


async def test_a_whole_number_may_be_written_as_a_decimal():
    async with connected(FakeOrchestrator()) as client:
        client.send("response.create")
        [*_, ended] = await client.until("response.done")
        item_id = ended["response"]["output"][0]["id"]
        client.send("playback.ack", item_id=item_id, audio_end_ms=12.0)
        fields = {"item_id": item_id, "content_index": 0}
        client.send("conversation.item.truncate", **fields, audio_end_ms=12.0)
        assert (await client.expect("conversation.item.truncated"))["audio_end_ms"] == 12
        client.send("conversation.item.truncate", **fields, audio_end_ms=12.5)
        assert (await client.expect("error"))["error"]["param"] == "audio_end_ms"
