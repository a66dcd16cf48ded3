"""Claims about work that a session delegates to responses."""

import asyncio
import json

import pytest
import websockets

from sglang_live.errors import StageFailedError
from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, spoken, voice
from test.unit.gateway.live.text_backend import TextBackend, called, said
from test.unit.gateway.live.world import LiveWorld, errors, text_of
from test.unit.gateway.live_server import listening
from test.unit.gateway.realtime.test_input_transcription import written

DELEGATE = done(function_calls=('{"name": "delegate", "arguments": {}}',))
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
RESPONSES = {"model": "gpt-5.6-luna", "instructions": "Be exact.", "tools": [WEATHER]}
DELEGATION = {"type": "responses", "responses": RESPONSES}
LOOK = [*spoken("Let me look.", 400)[:-1], DELEGATE]


def calls(*towns: str):
    """A response that asks for the weather of each town."""
    text = '{{"name": "weather", "arguments": {{"town": "{}"}}}}'
    return [done(function_calls=tuple(text.format(town) for town in towns))]


def nested(client, kind: str) -> list[dict]:
    return [e["event"] for e in client.of("response.event") if e["event"]["type"] == kind]


def made_calls(client) -> list[dict]:
    items = [event["item"] for event in nested(client, "response.output_item.done")]
    return [item for item in items if item["type"] == "function_call"]


def answer(client, call_id: str, output: str, **fields) -> None:
    item = {"type": "function_call_output", "call_id": call_id, "output": output}
    client.send("response.item.create", item=item, **fields)


def ask(client, text: str = "Find out.") -> None:
    client.send("session.commentary.append", content=text, delegation_id=None)


async def test_the_text_model_works_and_the_voice_tells_its_result():
    world = LiveWorld(LOOK, written("It is ten o'clock."), spoken("Ten.", 400))
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(30)
        [created] = client.of("session.delegation.created")
        delegation = created["delegation"]
        assert delegation["target"] == "responses"
        [begun] = nested(client, "response.created")
        assert begun["response"]["id"] == delegation["response_id"]
        assert {event["delegation_id"] for event in client.of("response.event")} == {
            delegation["id"]
        }
        texts = nested(client, "response.output_text.delta")
        assert "".join(event["delta"] for event in texts) == "It is ten o'clock."
        [completed] = nested(client, "response.completed")
        assert completed["response"]["usage"]["total_tokens"] == 15
        assert text_of(client.events) == "Let me look. Ten."
        work = world.session.turns[1]
        assert work.stateless and not work.wants_audio
        assert work.instructions.startswith("Be exact.")
        assert '"weather"' in work.tools.functions[0]
        # The conversation, up to the words before the work.
        assert [item.role for item in work.history] == ["system", "assistant"]
        told = world.session.turns[2].history[-1]
        assert told.role == "tool" and told.parts[0].text.endswith("It is ten o'clock.")


async def test_the_client_answers_the_calls_and_the_response_goes_on():
    world = LiveWorld(LOOK, calls("Rome", "Oslo"), written("Rain and snow."), spoken("Wet.", 400))
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(15)
        rome, oslo = made_calls(client)
        assert (rome["status"], rome["arguments"]) == ("completed", '{"town":"Rome"}')
        client.send("response.create", event_id="early")
        answer(client, rome["call_id"], "rain")
        answer(client, rome["call_id"], "rain", event_id="twice")
        client.send("response.create", event_id="early")
        await client.rest()
        assert [(e["code"], e["client_event_id"]) for e in errors(client.events)] == [
            ("function_call_outputs_required", "early"),
            ("invalid_value", "twice"),
            ("function_call_outputs_required", "early"),
        ]
        answer(client, oslo["call_id"], "snow")
        client.send("response.create")
        await client.ticks(20)
        first, second = nested(client, "response.created")
        assert first["response"]["id"] != second["response"]["id"]
        [delegation] = client.of("session.delegation.created")
        shown = {event["delegation_id"] for event in client.of("response.event")}
        assert shown == {delegation["delegation"]["id"]}
        work = world.session.turns[2]
        added = [(item.role, item.parts[0].text) for item in work.history[-4:]]
        assert [role for role, _ in added] == ["assistant", "assistant", "tool", "tool"]
        assert added[2:] == [("tool", "rain"), ("tool", "snow")]
        assert text_of(client.events) == "Let me look. Wet."


async def test_the_application_asks_in_writing():
    world = LiveWorld(written("Four."), spoken("It is four.", 400))
    async with world.connect(delegation=DELEGATION) as client:
        message = {"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]}
        client.send("response.item.create", item={"type": "message", **message})
        await client.ticks(3)
        assert not client.of("response.event")
        client.send("response.create")
        await client.ticks(20)
        assert all("delegation_id" not in event for event in client.of("response.event"))
        assert world.session.turns[0].history[-1].parts[0].text == "2 + 2?"
        assert text_of(client.events) == "It is four."


async def test_work_that_fails_is_told_and_drops_its_calls():
    world = LiveWorld(LOOK, [StageFailedError("gone")], spoken("Sorry.", 400))
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(25)
        [failed] = nested(client, "response.failed")
        assert failed["response"]["error"]["message"] == "gone"
        assert text_of(client.events) == "Let me look. Sorry."
        client.send("response.create")
        await client.rest()
        assert not errors(client.events)


async def test_work_of_all_sessions_is_bounded():
    world = LiveWorld(LOOK, spoken("Sorry.", 400), max_out_of_band_responses_in_all=1)
    world.shared.out_of_band_slots.take()  # another session has it
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(20)
        [failed] = nested(client, "response.failed")
        assert failed["response"]["error"]["code"] == "server_overloaded"


async def test_an_interruption_cancels_no_work():
    gate = asyncio.Event()
    work = [gate, *written("It is ten.")]
    world = LiveWorld(LOOK, work, spoken("Yes?", 400), written("Hey."), spoken("Ten.", 400))
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(10)
        await client.ticks(30, voice(1000))
        gate.set()
        await client.ticks(25)
        assert len(nested(client, "response.completed")) == 1
        assert text_of(client.events).endswith("Ten.")


async def test_items_are_checked_and_bounded():
    world = LiveWorld()
    async with world.connect(delegation=DELEGATION) as client:
        for item, code, param in (
            ({"type": "computer_call_output"}, "unsupported_parameter", "item.type"),
            ({"type": "message", "role": "user"}, "missing_required_parameter", "item.content"),
            (
                {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
                "invalid_value",
                "item.content[0].type",
            ),
            ({"role": "robot", "content": "x"}, "invalid_value", "item.role"),
            (
                {"type": "function_call_output", "call_id": "no", "output": "x"},
                "invalid_value",
                "item.call_id",
            ),
            ({"role": "user", "content": "x" * 33_000}, "response_input_buffer_full", "item"),
        ):
            client.send("response.item.create", item=item)
            await client.rest()
            error = errors(client.events)[-1]
            assert (error["code"], error["param"]) == (code, param)
        n_errors = len(errors(client.events))
        for _ in range(130):
            client.send("response.item.create", item={"role": "user", "content": "x"})
        await client.rest()
        codes = [error["code"] for error in errors(client.events)[n_errors:]]
        assert codes == ["response_input_buffer_full"] * 2


async def test_a_refused_output_does_not_block_the_chain():
    world = LiveWorld(LOOK, calls("Rome"), written("Rain."), spoken("Wet.", 400))
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(15)
        [call] = made_calls(client)
        answer(client, call["call_id"], "x" * 40_000)
        answer(client, call["call_id"], "too long")
        client.send("response.create")
        await client.ticks(15)
        assert len(errors(client.events)) == 1
        assert len(nested(client, "response.completed")) == 2


async def test_an_update_replaces_the_tools_while_a_call_waits():
    world = LiveWorld(LOOK, calls("Rome"), written("Rain."), spoken("Wet.", 400))
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(15)
        [call] = made_calls(client)
        form = {"type": "responses", "responses": {"tools": []}}
        client.send("session.update", session={"delegation": form})
        answer(client, call["call_id"], "rain")
        client.send("response.create")
        await client.ticks(15)
        shown = client.of("session.updated")[-1]["session"]["delegation"]["responses"]
        assert shown["tools"] == [] and shown["instructions"] == "Be exact."
        assert world.session.turns[2].tools.functions == ()
        for form in ({"type": "client"}, None):
            client.send("session.update", session={"delegation": form})
            await client.rest()
            assert errors(client.events)[-1]["code"] == "immutable_field_update"


async def test_appends_name_no_delegation():
    world = LiveWorld()
    async with world.connect(delegation=DELEGATION) as client:
        client.send("session.thinking.append", content="x", delegation_id="call_1")
        await client.rest()
        [error] = errors(client.events)
        assert error["param"] == "delegation_id"


async def test_a_session_closes_while_it_works():
    world = LiveWorld(LOOK, [asyncio.Event()])
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(10)
        assert len(nested(client, "response.created")) == 1
        client.send("session.close")
        await client.rest()
        assert client.events[-1]["type"] == "session.closed"
    assert world.wire.closed == (1000, "close_requested")


# --- the operator's own text model, behind a real URL, in real time ---


class Guest:
    """A client of a whole gateway. It answers each call with its name."""

    def __init__(self, socket):
        self._socket = socket
        self.events: list[dict] = []

    async def send(self, kind: str, **fields) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def until(self, text: str) -> None:
        """Until the agent has said this."""
        async with asyncio.timeout(20):
            while text not in text_of(self.events):
                event = json.loads(await self._socket.recv())
                self.events.append(event)
                await self._act(event.get("event", {}))

    async def _act(self, event: dict) -> None:
        if event.get("type") == "response.output_item.done":
            if event["item"]["type"] == "function_call":
                item = {"type": "function_call_output", "call_id": event["item"]["call_id"]}
                item["output"] = event["item"]["arguments"]
                await self.send("response.item.create", item=item)
        elif event.get("type") == "response.completed" and self._calls_of_last():
            await self.send("response.create")

    def nested(self, kind: str) -> list[dict]:
        found = [event["event"] for event in self.events if event["type"] == "response.event"]
        return [event for event in found if event["type"] == kind]

    def _calls_of_last(self) -> bool:
        items = self.nested("response.output_item.done")
        return bool(items) and items[-1]["item"]["type"] == "function_call"


async def called_up(backend: TextBackend, until: str, *scripts: list, **config) -> Guest:
    orchestrator = FakeOrchestrator([LOOK, *scripts], model_name="demo")
    async with backend.serving() as url:
        own = {"live_backend": url, "live_backend_key": "sk-own", "api_keys": ("guest-key",)}
        async with listening(app_of(orchestrator, **own, **config)) as host:
            headers = {"authorization": "Bearer guest-key"}
            address = f"ws://{host}/v1/live/sessions"
            async with websockets.connect(address, additional_headers=headers) as socket:
                guest = Guest(socket)
                session = {"model": "demo", "delegation": DELEGATION}
                await guest.send("session.start", session=session)
                await guest.send(
                    "session.commentary.append", content="Find out.", delegation_id=None
                )
                await guest.until(until)
    return guest


async def test_the_operators_text_model_works_with_the_clients_functions():
    calls = called(("weather", '{"town": "Rome"}'), ("weather", '{"town": "Oslo"}'))
    backend = TextBackend(calls, said("Rain ", "and snow."))
    guest = await called_up(backend, "Wet.", spoken("Wet.", 400))
    assert backend.headers["authorization"] == "Bearer sk-own"
    assert "guest-key" not in json.dumps(backend.asked) + json.dumps(backend.headers)
    first, second = backend.asked
    assert first["model"] == RESPONSES["model"]
    assert first["instructions"].startswith("Be exact.")
    assert [item["role"] for item in first["input"]] == ["developer", "assistant"]
    assert first["input"][1]["content"] == "Let me look."
    added = [(item["type"], item["call_id"]) for item in second["input"][-4:]]
    assert [kind for kind, _ in added] == 2 * ["function_call"] + 2 * ["function_call_output"]
    assert [call_id for _, call_id in added[:2]] == [call_id for _, call_id in added[2:]]
    [end] = [e for e in guest.nested("response.completed") if e["response"]["usage"]][-1:]
    assert end["response"]["usage"]["total_tokens"] == 10
    assert end["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize(
    "answer,code",
    [
        (503, "backend_unavailable"),
        (401, "backend_refused"),
        (2.0, "backend_timeout"),
        (b"data: {\n\n", "backend_malformed"),
        (b"data: " + b"x" * (5 << 20), "backend_oversized"),
    ],
)
async def test_what_the_operators_model_does_wrong_is_told_and_the_session_goes_on(answer, code):
    backend = TextBackend(answer)
    guest = await called_up(backend, "Sorry.", spoken("Sorry.", 400), live_backend_timeout_s=0.5)
    [failed] = guest.nested("response.failed")
    assert failed["response"]["error"]["code"] == code
    assert "secret" not in json.dumps(guest.events)


async def test_the_served_models_name_is_the_served_model():
    backend = TextBackend()
    orchestrator = FakeOrchestrator([written("Four."), spoken("Four.", 400)], model_name="demo")
    async with (
        backend.serving() as url,
        listening(app_of(orchestrator, live_backend=url)) as host,
        websockets.connect(f"ws://{host}/v1/live/sessions") as socket,
    ):
        guest = Guest(socket)
        form = {"type": "responses", "responses": {"model": "demo"}}
        await guest.send("session.start", session={"model": "demo", "delegation": form})
        await guest.send("response.item.create", item={"role": "user", "content": "2 + 2?"})
        await guest.send("response.create")
        await guest.until("Four.")
    assert backend.asked == []


async def test_a_name_that_the_operator_has_not_given_is_refused_at_the_start():
    world = LiveWorld(live_backend="http://127.0.0.1/v1/responses", live_backend_model="luna")
    form = {"type": "responses", "responses": {"model": "other"}}
    async with world.connect(delegation=form) as client:
        [error] = errors(client.events)
        assert error["code"] == "model_not_found"
        assert error["param"] == "session.delegation.responses.model"
    assert world.wire.closed == (1008, "model_not_found")
