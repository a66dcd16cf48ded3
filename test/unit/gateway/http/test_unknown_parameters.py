"""Every key of the protocol is accepted, and an error names every other key."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sglang_live.gateway.realtime.session_config import WITHOUT_EFFECT
from test.protocol.ga_events import CALL_ID, client_secret_requests, events
from test.unit.gateway.fakes import FakeOrchestrator, app_of, connected, types

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "name": "weather", "call_id": CALL_ID, "arguments": "{}"}
# Values that the types allow and this server does not support: their path and error code.
REFUSED = {
    "item.content[0].type": "unsupported_content_type",
    "item.type": "invalid_value",
    "response.input[0].content[0].type": "unsupported_content_type",
    "response.input[0].type": "invalid_value",
    "response.conversation": "invalid_value",
    "response.tool_choice.type": "invalid_value",
    "response.tools[0].type": "invalid_value",
    "session.tool_choice.type": "invalid_value",
    "session.tools[0].type": "invalid_value",
    "session.truncation": "invalid_value",  # this server keeps whole conversations
    "session.type": "unsupported_session_type",
    "session.model": "model_not_found",
    "session.audio.input.transcription.model": "model_not_found",
    "session.audio.output.voice": "invalid_value",
    "response.audio.output.voice": "invalid_value",
    **{f"session.{path}": "unsupported_parameter" for path in WITHOUT_EFFECT},
    "session.include": "unsupported_parameter",  # this model has none
    **{f"response.{path}": "unsupported_parameter" for path in ("prompt", "reasoning")},
}
# Names that the types allow only as any text.
UNKNOWN_NAMES = ("some_model", "some_voice", {"id": "some_id"})
# Codes of events that need another state: no such item, nothing to cancel or to commit.
UNSUPPORTED = "unsupported_parameter"
STATE = {
    "item_delete_invalid_item_id",
    "item_retrieve_invalid_item_id",
    "item_truncate_invalid_item_id",
    "response_cancel_not_active",
    "input_audio_buffer_commit_empty",
    "item_create_duplicate_item_id",
    "cannot_update_voice",
}


def is_expected(error: dict[str, Any], event: dict[str, Any]) -> bool:
    if event["type"] == "output_audio_buffer.clear":
        return error["param"] == "type"
    return error["code"] in STATE or REFUSED.get(error["param"]) == error["code"]


async def events_after(client, event: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of the server that follow one event, to the end of the response if it has one."""
    client.send_raw(json.dumps(event))
    client.send("conversation.item.retrieve", item_id="marker", event_id="marker")
    received = []
    while not is_marker(event := await client.next()):
        received.append(event)
    if "response.created" in types(received) and "response.done" not in types(received):
        received += await client.until("response.done")
    return received


def is_marker(event: dict[str, Any]) -> bool:
    return event["type"] == "error" and event["error"]["event_id"] == "marker"


async def prepare(client) -> None:
    client.turn_detection(None)
    client.update(tools=[WEATHER])
    client.send("conversation.item.create", item=CALL)
    await client.until("conversation.item.done")


async def try_out_types(allowed: list[dict[str, Any]]) -> int:
    """Returns the number of accepted events."""
    n_accepted = 0
    async with connected(FakeOrchestrator()) as client:
        await prepare(client)
        for event in allowed:
            answers = await events_after(client, event)
            errors = [answer["error"] for answer in answers if answer["type"] == "error"]
            assert all(is_expected(error, event) for error in errors), (event, errors)
            n_accepted += not errors
            if not errors and event.get("item", {}).get("type") == "function_call_output":
                # A call has one output: the next event brings another.
                client.send("conversation.item.delete", item_id=answers[0]["item"]["id"])
                await client.until("conversation.item.deleted")
            if event["type"] == "session.update":  # the next event begins with the same settings
                client.update(tools=[WEATHER], output_modalities=["audio"])
                await client.find("session.updated")
    return n_accepted


async def test_everything_that_the_protocols_types_allow_is_accepted():
    assert await try_out_types(list(events())) > 150


async def test_the_settings_of_a_session_can_be_sent_again():
    async with connected(FakeOrchestrator()) as client:
        client.update(instructions="Be kind.", audio={"output": {"voice": "bob"}})
        shown = (await client.expect("session.updated"))["session"]
        client.send("session.update", session=shown)
        assert (await client.expect("session.updated"))["session"] == shown


@pytest.mark.parametrize(
    "session",
    [
        {"audio": {"input": {"turn_detection": {"type": "server_vad", "model_version": "2"}}}},
        {"audio": {"input": {"noise_reduction": None}, "output": {"speed": 1}}},
        {"audio": {"input": {"transcription": {"keywords": [], "languages": None}}}},
        {"reasoning": {"effort": None}, "parallel_tool_calls": False, "model": "gpt-realtime-2"},
        {"tracing": {"group_id": None, "metadata": None, "workflow_name": None}},
        {"tracing": "auto", "include": [], "prompt": None},
        {"tools": [{**WEATHER, "strict": True, "description": None}]},
        {"object": "realtime.session", "id": "sess_1", "expires_at": 1},
    ],
    ids=json.dumps,
)
async def test_parameters_of_newer_clients_are_accepted(session):
    async with connected(FakeOrchestrator()) as client:
        client.update(**session)
        await client.expect("session.updated")


INPUT, OUTPUT = "audio.input", "audio.output"


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("prompt", {"id": "pmpt_1", "variables": {"town": "Rome"}, "version": None}, UNSUPPORTED),
        ("reasoning", {"effort": "low"}, UNSUPPORTED),
        ("include", ["item.input_audio_transcription.logprobs"], UNSUPPORTED),
        ("tracing", {"workflow_name": "w"}, UNSUPPORTED),
        (f"{INPUT}.noise_reduction", {"type": "near_field"}, UNSUPPORTED),
        (f"{INPUT}.noise_reduction", {"strength": 0.5}, UNSUPPORTED),
        (f"{INPUT}.transcription.delay", "low", UNSUPPORTED),
        (f"{INPUT}.transcription.model", "our-own", "model_not_found"),
        (f"{INPUT}.transcription.model", "", "model_not_found"),
        (f"{OUTPUT}.speed", 1.6, "invalid_value"),
        (f"{OUTPUT}.speed", 0, "invalid_value"),
        (f"{OUTPUT}.voice", "nora", "invalid_value"),
        (f"{OUTPUT}.voice", {"id": "voice_1234"}, "invalid_value"),
        (f"{OUTPUT}.voice", "", "invalid_value"),
        ("model", "our-own", "model_not_found"),
        ("model", "", "model_not_found"),
    ],
)
async def test_a_setting_without_effect_is_one_error_with_its_path_and_changes_nothing(
    path, value, code
):
    settings: Any = value
    for name in reversed(path.split(".")):
        settings = {name: settings}
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        body = {"session": {"type": "realtime", **settings}}
        made = (await http.post("/v1/realtime/client_secrets", json=body)).json()["error"]
    async with connected(FakeOrchestrator()) as client:
        before = await session_of(client)
        client.update(instructions="new", **settings)
        refused = (await client.expect("error"))["error"]
        for error in (made, refused):
            assert (error["code"], error["param"]) == (code, f"session.{path}")
        if path in ("prompt", "reasoning", f"{OUTPUT}.speed", f"{OUTPUT}.voice"):
            client.send("response.create", response=settings)
            error = (await client.expect("error"))["error"]
            assert (error["code"], error["param"]) == (code, f"response.{path}")
        assert await session_of(client) == before


async def test_the_error_for_an_unknown_voice_has_the_list_of_voices():
    async with connected(FakeOrchestrator()) as client:
        client.update(audio={"output": {"voice": "nora"}})
        assert "ada, bob" in (await client.expect("error"))["error"]["message"]


@pytest.mark.parametrize(("voice", "speaks"), [("BOB", "bob"), ("marin", "ada"), (None, "ada")])
async def test_a_session_speaks_with_the_voice_that_it_names(voice, speaks):
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.update(audio={"output": {"voice": voice and {"id": voice}}})
        await client.expect("session.updated")
        client.say("Hi.")
        client.send("response.create")
        await client.until("response.done")
        assert orchestrator.turns[0].voice == speaks


# --- the beta's names ---

BETA = {
    "session.input_audio_format": ("g711_ulaw", "session.audio.input.format"),
    "session.output_audio_format": ("pcm16", "session.audio.output.format"),
    "session.modalities": (["text"], "session.output_modalities"),
    "session.turn_detection": (None, "session.audio.input.turn_detection"),
    "session.voice": ("alloy", "session.audio.output.voice"),
    "session.speed": (1.0, "session.audio.output.speed"),
    "session.max_response_output_tokens": ("inf", "session.max_output_tokens"),
    "session.input_audio_transcription": (
        {"model": "whisper-1"},
        "session.audio.input.transcription",
    ),
    "session.input_audio_noise_reduction": (None, "session.audio.input.noise_reduction"),
    "session.tool_choice": (
        {"type": "function", "function": {"name": "weather"}},
        "session.tool_choice.name",
    ),
    "session.tools": (
        [WEATHER, {"type": "function", "function": {"name": "look"}}],
        "session.tools[1].name",
    ),
    "response.modalities": (["text"], "response.output_modalities"),
    "response.voice": ("alloy", "response.audio.output.voice"),
    "response.output_audio_format": ("pcm16", "response.audio.output.format"),
    "response.max_response_output_tokens": (7, "response.max_output_tokens"),
}


@pytest.mark.parametrize("path", BETA)
async def test_the_error_for_a_key_of_the_beta_has_its_present_name(path):
    value, known = BETA[path]
    holder, key = path.split(".")
    kind = {"session": "session.update", "response": "response.create"}[holder]
    fields = {"type": "realtime"} if holder == "session" else {}
    async with connected(FakeOrchestrator()) as client:
        await prepare(client)
        before = await session_of(client)
        # The other settings of the event are not applied either.
        client.send(kind, event_id="e", **{holder: {**fields, "instructions": "new", key: value}})
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["event_id"]) == ("unknown_parameter", "e")
        assert error["param"].startswith(path)
        assert f"'{known}'" in error["message"]
        assert await session_of(client) == before


@pytest.mark.parametrize(
    ("role", "kind", "known"),
    [
        ("assistant", "text", "output_text"),
        ("user", "text", "input_text"),
        ("user", "audio", "input_audio"),
    ],
)
async def test_the_error_for_content_of_the_beta_has_its_present_name(role, kind, known):
    item = {"type": "message", "role": role, "content": [{"type": kind, "text": "Hello."}]}
    async with connected(FakeOrchestrator()) as client:
        client.send("conversation.item.create", item=item)
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"]) == (
            "unsupported_content_type",
            "item.content[0].type",
        )
        assert f"'{known}'" in error["message"]


async def test_the_error_for_an_event_of_the_beta_has_its_present_name():
    async with connected(FakeOrchestrator()) as client:
        client.send("transcription_session.update", session={"input_audio_format": "pcm16"})
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "type")
        assert "'session.update'" in error["message"]


async def session_of(client) -> dict[str, Any]:
    client.update()
    return (await client.expect("session.updated"))["session"]


# --- keys of no protocol ---

# Below these paths, clients may send any key.
FREE = ("parameters", "metadata", "variables")


def with_one_more_key(value: Any, path: str = "") -> Iterator[tuple[Any, str]]:
    """Copies of a value, each with an unknown key in another of its objects, and the key's path."""
    if isinstance(value, dict):
        yield {**value, "no_such_key": 1}, f"{path}.no_such_key".lstrip(".")
        for key, part in value.items():
            if key not in FREE:
                for changed, at in with_one_more_key(part, f"{path}.{key}".lstrip(".")):
                    yield {**value, key: changed}, at
    elif isinstance(value, list):
        for n, part in enumerate(value):
            for changed, at in with_one_more_key(part, f"{path}[{n}]"):
                yield [*value[:n], changed, *value[n + 1 :]], at


def shapes_of(allowed: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Copies of the valid events, each with an unknown key as its only fault; the key's path."""
    changed = (pair for event in allowed for pair in with_one_more_key(event))
    return [(event, at) for event, at in changed if not REFUSED.keys() & set(_places(event))]


def _places(event: dict[str, Any]) -> Iterator[str]:
    """Paths of the event's values that are refused without an unknown key."""
    item = event.get("item") or {}
    listed = (event.get("response") or {}).get("input") or [{}]
    for place, each in (("item", item), ("response.input[0]", listed[0])):
        if str(each.get("type")).startswith("mcp"):
            yield f"{place}.type"
        parts = each.get("content") or [{}]
        if parts[0].get("type") in ("input_image", "output_audio"):
            yield f"{place}.content[0].type"
    for place in ("session", "response"):
        holder = event.get(place) or {}
        choice, tools = holder.get("tool_choice"), holder.get("tools") or [{}]
        if isinstance(choice, dict) and choice["type"] == "mcp":
            yield f"{place}.tool_choice.type"
        if tools[0].get("type") == "mcp":
            yield f"{place}.tools[0].type"
    for path, code in REFUSED.items():
        value: Any = event
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value in UNKNOWN_NAMES or (code == UNSUPPORTED and value not in (None, "auto", {})):
            yield path


async def try_out_unknown_keys(allowed: list[dict[str, Any]]) -> int:
    """Returns the number of places that were tried."""
    shapes = shapes_of(allowed)
    async with connected(FakeOrchestrator()) as client:
        await prepare(client)
        before = await session_of(client)
        for event, at in shapes:
            [error] = await events_after(client, event)
            assert error["type"] == "error", event
            assert error["error"]["code"] == "unknown_parameter", (event, error)
            assert error["error"]["param"] == at
        assert await session_of(client) == before
    return len(shapes)


async def test_an_unknown_key_is_one_error_with_its_path_and_changes_nothing():
    assert await try_out_unknown_keys(list(events())) > 600


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("semantic_vad", {"threshold": 0.5}),
        ("semantic_vad", {"silence_duration_ms": 200}),
        ("semantic_vad", {"idle_timeout_ms": 5000}),
        ("server_vad", {"eagerness": "low"}),
        ("server_vad", {"frame_ms": 80}),
        ("frames", {"threshold": 0.5}),
    ],
)
async def test_the_error_names_a_setting_of_another_turn_detection(kind, keys):
    [name] = keys
    async with connected(FakeOrchestrator()) as client:
        client.update(output_modalities=["text"])
        await client.expect("session.updated")
        client.turn_detection({"type": kind, **keys})
        error = (await client.expect("error"))["error"]
        assert error["code"] == "unknown_parameter"
        assert error["param"] == f"session.audio.input.turn_detection.{name}"
        client.turn_detection({"type": kind, name: None})  # null is an absent setting
        await client.expect("session.updated")


# --- the same over HTTP ---

SECRETS = "/v1/realtime/client_secrets"


async def test_client_secrets_accept_everything_that_the_protocols_types_allow():
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    n_accepted = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for body in client_secret_requests():
            response = await http.post(SECRETS, json=body)
            if response.status_code == 200:
                n_accepted += 1
                continue
            error = response.json()["error"]
            is_expected = REFUSED.get(error["param"]) == error["code"]
            # Without its functions, the session chooses none.
            assert is_expected or error["param"] == "session.tool_choice", (body, error)
            for changed, at in with_one_more_key(body):
                response = await http.post(SECRETS, json=changed)
                assert response.status_code == 400, (changed, at)
    assert n_accepted > 70


@pytest.mark.parametrize(
    ("body", "param", "known"),
    [
        (
            {"session": {"type": "realtime", "voice": "alloy"}},
            "session.voice",
            "audio.output.voice",
        ),
        ({"session": {"type": "realtime", "modalities": []}}, "session.modalities", "output_mod"),
        ({"model": "demo", "voice": "alloy"}, "model", ""),  # the beta's /v1/realtime/sessions
        ({"expires_after": {"minutes": 5}}, "expires_after.minutes", ""),
        ({"session": {"type": "realtime", "instructions": "\ud800"}}, "session.instructions", ""),
    ],
)
async def test_the_error_of_client_secrets_names_the_parameter(body, param, known):
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.post(SECRETS, content=json.dumps(body))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert known in error["message"]
