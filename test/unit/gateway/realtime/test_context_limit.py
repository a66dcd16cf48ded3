"""Input that cannot fit into the model's context is refused when it arrives."""

import base64
import re

import httpx
import pytest

from sglang_live.errors import StageUnavailableError
from test.unit.gateway.fakes import FakeOrchestrator, app_of, connected, services, tone, types

MOST = 100  # tokens of a prompt; a character is one, a second of audio ten
LONG = "x" * (MOST + 1)
TEXT = {"output_modalities": ["text"]}


def message(*content: dict, role: str = "user") -> dict:
    return {"type": "message", "role": role, "content": list(content)}


def text(words: str, kind: str = "input_text") -> dict:
    return {"type": kind, "text": words}


def audio(duration_s: float) -> dict:
    return {"type": "input_audio", "audio": base64.b64encode(tone(1000 * duration_s)).decode()}


def tool(description: str) -> dict:
    return {"type": "function", "name": "f", "description": description, "parameters": {}}


CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
# Items, each with the path of its part that is too long.
TOO_LONG = {
    "user text": (message(text(LONG)), "content[0].text"),
    "system text": (message(text(LONG), role="system"), "content[0].text"),
    "assistant text": (message(text(LONG, "output_text"), role="assistant"), "content[0].text"),
    "audio": (message(audio(11)), "content[0].audio"),
    "text in parts": (message(text(LONG[:60]), text(LONG[:60])), "content"),
    "text and audio": (message(text(LONG[:60]), audio(6)), "content"),
    "output of a call": (OUTPUT | {"output": LONG}, "output"),
    "call": (CALL | {"arguments": f'{{"a":"{LONG}"}}', "call_id": "d"}, "arguments"),
}


async def refused(client) -> dict:
    """The error that is the only response to the last event."""
    events = await client.settle()
    assert types(events) == ["error"]
    error = events[0]["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    return error


async def history_of_next_turn(client, orchestrator) -> list[str]:
    """Runs a turn. Returns the texts of its history."""
    client.say("Hi.")
    client.send("response.create", response=TEXT)
    done = await client.find("response.done")
    assert done["response"]["status"] == "completed"
    return [part.text for item in orchestrator.turns[-1].history for part in item.parts]


@pytest.mark.parametrize(("item", "place"), TOO_LONG.values(), ids=TOO_LONG)
async def test_an_item_that_cannot_fit_is_refused_and_the_session_continues(item, place):
    orchestrator = FakeOrchestrator(most_tokens=MOST)
    async with connected(orchestrator) as client:
        client.send("conversation.item.create", item=CALL)
        await client.until("conversation.item.done")
        client.send("conversation.item.create", item=item | {"id": "long"})
        error = await refused(client)
        assert error["param"] == f"item.{place}"
        client.send("conversation.item.retrieve", item_id="long")
        assert (await client.expect("error"))["error"]["code"] == "item_retrieve_invalid_item_id"
        assert (await history_of_next_turn(client, orchestrator))[1:] == ["Hi."]


async def test_the_error_has_the_length_that_fits():
    orchestrator = FakeOrchestrator(most_tokens=MOST)
    async with connected(orchestrator) as client:
        client.say("x" * 4 * MOST)
        [characters] = re.findall(
            r"about (\d+) such characters", (await refused(client))["message"]
        )
        client.say("x" * int(characters))
        await client.until("conversation.item.done")
        assert int(characters) > MOST * 0.9
        client.send("conversation.item.create", item=message(audio(25)))
        [seconds] = re.findall(r"about (\d+) s of audio", (await refused(client))["message"])
        client.send("conversation.item.create", item=message(audio(int(seconds))))
        await client.until("conversation.item.done")
        assert int(seconds) == 10


@pytest.mark.parametrize(
    ("session", "place"),
    [
        ({"instructions": "x" * 80}, "instructions"),
        ({"tools": [tool("x" * 80)]}, "tools"),
        ({"tools": [tool("x" * 10)], "instructions": "x" * 50}, "tools"),
        ({"tools": [tool("x" * 10)], "instructions": "x" * 80}, "instructions"),
        ({"tools": [tool("x" * 80)], "tool_choice": "none"}, "tools"),
    ],
)
async def test_settings_that_leave_no_room_are_refused_as_a_whole(session, place):
    orchestrator = FakeOrchestrator(most_tokens=MOST)
    async with connected(orchestrator) as client:
        client.update(instructions="Be brief.")
        before = (await client.expect("session.updated"))["session"]
        client.update(**session, **TEXT)
        assert (await refused(client))["param"] == f"session.{place}"
        client.update()
        assert (await client.expect("session.updated"))["session"] == before
        client.send("response.create", response=session)
        assert (await refused(client))["param"] == f"response.{place}"
        assert await history_of_next_turn(client, orchestrator) == ["Hi."]


async def test_the_error_names_the_setting_of_the_last_event():
    async with connected(FakeOrchestrator(most_tokens=MOST)) as client:
        client.update(tools=[tool("x")])
        await client.expect("session.updated")
        client.update(instructions="x" * 60)
        assert (await refused(client))["param"] == "session.instructions"


@pytest.mark.parametrize(
    ("entries", "place"),
    [
        ([message(text("x")), message(text(LONG))], "response.input[1].content[0].text"),
        ([message(text("x" * 60)), message(text("x" * 60))], "response.input"),
        ([message(text("x" * 60)), message(audio(6))], "response.input"),
        ([{"type": "item_reference", "id": "a"}, message(text("x" * 60))], "response.input"),
    ],
)
@pytest.mark.parametrize("conversation", ["none", "auto"])
async def test_an_input_of_a_response_that_cannot_fit_is_refused(entries, place, conversation):
    orchestrator = FakeOrchestrator(most_tokens=MOST)
    async with connected(orchestrator) as client:
        client.say("y" * 60, "a")
        await client.settle()
        form = {"input": entries, "conversation": conversation, **TEXT}
        client.send("response.create", response=form)
        assert (await refused(client))["param"] == place
        assert await history_of_next_turn(client, orchestrator) == ["y" * 60, "Hi."]


async def test_an_input_of_a_response_needs_room_for_the_instructions_too():
    orchestrator = FakeOrchestrator(most_tokens=MOST)
    async with connected(orchestrator) as client:
        form = {"input": [message(text("x" * 60))], "conversation": "none", **TEXT}
        client.send("response.create", response=form)
        await client.until("response.done")
        client.send("response.create", response=form | {"instructions": "y" * 50})
        error = await refused(client)
        assert error["param"] == "response.input"
        assert "At most 50 tokens" in error["message"]


async def test_unchanged_settings_are_not_measured_again():
    orchestrator = FakeOrchestrator(most_tokens=MOST)
    async with connected(orchestrator) as client:
        client.update(instructions="Be brief.")
        await client.settle()
        orchestrator.measured.clear()
        await client.settle()
        client.send("response.create")
        await client.until("response.done")
        assert orchestrator.measured == []


async def test_content_that_no_thinker_can_measure_is_accepted_and_counted():
    failing = StageUnavailableError("no thinker is up")
    orchestrator = FakeOrchestrator(measure_fails_with=failing)
    shared = services(orchestrator)
    async with connected(orchestrator, shared) as client:
        client.say(LONG, "long")
        assert (await client.find("conversation.item.done"))["item"]["id"] == "long"
        assert await history_of_next_turn(client, orchestrator) == [LONG, "Hi."]
    value = shared.metrics.registry.get_sample_value
    assert value("sglang_live_gateway_prompts_unmeasured_total") == 2


async def test_no_client_secret_is_made_for_settings_that_leave_no_room():
    orchestrator = FakeOrchestrator(most_tokens=MOST)
    transport = httpx.ASGITransport(app_of(orchestrator))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        path = "/v1/realtime/client_secrets"
        for length, status in ((80, 400), (60, 200)):
            session = {"type": "realtime", "instructions": "x" * length}
            response = await http.post(path, json={"session": session})
            assert response.status_code == status
            if status == 400:
                error = response.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert error["param"] == "session.instructions"
