"""Sessions that write down what is said, and say nothing."""

from contextlib import asynccontextmanager

import pytest
from starlette.testclient import TestClient

from sglang_live.core import HeardToken, TranscriptDelta
from test.unit.gateway.fakes import FakeOrchestrator, app_of, connected, done, tone, types
from test.unit.gateway.realtime.test_input_transcription import KIND, SILENCE_1S, of_kind, written

SECRETS = "/v1/realtime/client_secrets"
PAUSE = SILENCE_1S[:14_400]


@asynccontextmanager
async def transcribing(*scripts: list, model: str | None = None, **config):
    orchestrator = FakeOrchestrator(list(scripts))
    protocol = {"transcribes": True, "model": model}
    async with connected(orchestrator, protocol=protocol, **config) as client:
        yield client, orchestrator


def update(client, **settings) -> None:
    client.send("session.update", session={"type": "transcription", **settings})


async def test_a_turn_is_written_down_and_not_answered():
    async with transcribing(written("Is it", " raining?")) as (client, orchestrator):
        client.append(tone(500) + SILENCE_1S)
        events = await client.until(KIND + "completed")
        assert [e["delta"] for e in of_kind(events, "delta")] == ["Is it", " raining?"]
        assert events[-1]["transcript"] == "Is it raining?"
        wanted = ["speech_started", "speech_stopped", "committed"]
        assert [t.removeprefix("input_audio_buffer.") for t in types(events)][:3] == wanted
        update(client)
        rest = await client.until("session.updated")
        assert not [t for t in types([*events, *rest]) if t.startswith("response.")]
        assert [turn.transcribes for turn in orchestrator.turns] == [True]


async def test_logprobs_are_included_where_the_recogniser_has_them():
    heard = (HeardToken(b" Hi", -0.25, 0.1, 0.2),)
    script = [TranscriptDelta("Hi"), done("Hi", heard=heard)]
    gives = {"recognises": True, "recogniser_gives": ("details",)}
    async with transcribing(script, **gives) as (client, orchestrator):
        update(client, include=["item.input_audio_transcription.logprobs"])
        shown = (await client.find("session.updated"))["session"]
        assert shown["include"] == ["item.input_audio_transcription.logprobs"]
        client.append(tone(500) + SILENCE_1S)
        completed = await client.find(KIND + "completed")
        assert completed["logprobs"] == [{"token": " Hi", "logprob": -0.25, "bytes": [32, 72, 105]}]
        assert [turn.in_detail for turn in orchestrator.turns] == [True]
        update(client, include=None)
        assert (await client.find("session.updated"))["session"]["include"] is None


async def test_turns_that_the_client_ends():
    async with transcribing(written("Hello."), written("Bye.")) as (client, _):
        update(client, audio={"input": {"turn_detection": None}})
        shown = (await client.find("session.updated"))["session"]
        assert shown["audio"]["input"]["turn_detection"] is None
        for text in ("Hello.", "Bye."):
            client.append(tone(500))
            client.send("input_audio_buffer.commit")
            assert (await client.find(KIND + "completed"))["transcript"] == text
        client.append(tone(500))
        client.send("input_audio_buffer.clear")
        await client.expect("input_audio_buffer.cleared")


async def test_words_come_while_the_user_speaks_where_there_is_a_recogniser():
    said = (written("Hello there."), written("It rains."))
    async with transcribing(*said, prefills_at_pauses=True) as (client, orchestrator):
        client.append(tone(3500) + PAUSE)
        await client.expect("input_audio_buffer.speech_started")
        client.append(tone(800))
        assert (await client.find(KIND + "delta"))["delta"] == "Hello there."
        client.append(SILENCE_1S)
        events = await client.until(KIND + "completed")
        assert events[-1]["transcript"] == "Hello there. It rains."
        assert "input_audio_buffer.committed" in types(events)
        # The language model has nothing to prefill.
        assert not orchestrator.session.prefilled


async def test_the_session_shows_its_own_form():
    async with transcribing(model="gpt-4o-transcribe") as (client, _):
        update(
            client,
            audio={
                "input": {
                    "format": {"type": "audio/pcmu"},
                    "turn_detection": {"type": "server_vad", "silence_duration_ms": 700},
                }
            },
        )
        shown = (await client.find("session.updated"))["session"]
        assert (shown["type"], shown["object"]) == (
            "transcription",
            "realtime.transcription_session",
        )
        heard = shown["audio"]["input"]
        assert heard["format"] == {"type": "audio/pcmu"}
        assert heard["transcription"] == {"model": "gpt-4o-transcribe"}
        assert heard["turn_detection"]["silence_duration_ms"] == 700
        assert "create_response" not in heard["turn_detection"]
        assert "output" not in shown["audio"] and "instructions" not in shown
        update(client, audio={"input": {"transcription": {"language": "de", "prompt": "Regen"}}})
        shown = (await client.find("session.updated"))["session"]
        heard = shown["audio"]["input"]["transcription"]
        assert heard == {"language": "de", "prompt": "Regen"}
        update(client, audio={"input": {"transcription": None}})
        shown = (await client.find("session.updated"))["session"]
        assert shown["audio"]["input"]["transcription"] == {"model": "gpt-4o-transcribe"}


async def test_hints_reach_the_model_in_words():
    async with transcribing(written("Regen.")) as (client, orchestrator):
        hints = {"languages": ["de", "en"], "keywords": ["Regen", "Matte"], "prompt": "Weather."}
        update(client, audio={"input": {"transcription": hints}})
        shown = (await client.find("session.updated"))["session"]
        assert shown["audio"]["input"]["transcription"] == hints
        client.append(tone(500) + SILENCE_1S)
        await client.until(KIND + "completed")
        [turn] = orchestrator.turns
        asked = turn.history[0].parts[-1].text
        assert "Weather." in asked and "de, en" in asked and "Regen, Matte" in asked


async def test_one_language_of_a_list_is_the_language():
    async with transcribing(written("Regen.")) as (client, orchestrator):
        update(client, audio={"input": {"transcription": {"languages": ["de"]}}})
        await client.expect("session.updated")
        client.append(tone(500) + SILENCE_1S)
        await client.until(KIND + "completed")
        assert "de" in orchestrator.turns[0].history[0].parts[-1].text


async def test_a_recogniser_refuses_hints_that_it_cannot_heed():
    async with transcribing(recognises=True, hears="en") as (client, _):
        update(client, audio={"input": {"transcription": {"languages": ["en"]}}})
        await client.expect("session.updated")
        for hints in ({"keywords": ["rain"]}, {"languages": ["de"]}, {"prompt": "Weather."}):
            update(client, audio={"input": {"transcription": hints}})
            error = (await client.expect("error"))["error"]
            assert error["param"].startswith("session.audio.input.transcription.")


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("response.create", {}),
        ("response.cancel", {}),
        ("conversation.item.truncate", {"item_id": "x", "content_index": 0, "audio_end_ms": 1}),
        ("conversation.item.create", {"item": {"type": "message", "role": "user", "content": []}}),
        ("output_audio_buffer.clear", {}),
    ],
)
async def test_events_of_a_conversation_are_refused(event, fields):
    async with transcribing(written("Hello.")) as (client, _):
        client.send(event, **fields)
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"]) == ("transcription_session", "type")
        client.append(tone(500) + SILENCE_1S)
        assert (await client.find(KIND + "completed"))["transcript"] == "Hello."


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"type": "realtime"}, "session.type"),
        ({"instructions": "Be kind."}, "session.instructions"),
        ({"tools": []}, "session.tools"),
        ({"audio": {"output": {"voice": "marin"}}}, "session.audio.output"),
        (
            {"audio": {"input": {"turn_detection": {"type": "frames"}}}},
            "session.audio.input.turn_detection.type",
        ),
        ({"include": ["item.input_audio_transcription.logprobs"]}, "session.include"),
        (
            {"audio": {"input": {"transcription": {"model": "another"}}}},
            "session.audio.input.transcription.model",
        ),
    ],
)
async def test_settings_of_a_conversation_are_refused_and_change_nothing(settings, param):
    async with transcribing() as (client, _):
        update(client, **settings)
        assert (await client.expect("error"))["error"]["param"] == param
        update(client)
        shown = (await client.find("session.updated"))["session"]
        assert shown["audio"]["input"]["turn_detection"]["type"] == "server_vad"


# --- how one is opened ---


@pytest.fixture
def server():
    with TestClient(app_of(FakeOrchestrator(), api_keys=("k",))) as client:
        yield client


BEARER = {"Authorization": "Bearer k"}


@pytest.mark.parametrize(
    "query", ["intent=transcription", "intent=transcription&model=gpt-4o-mini-transcribe"]
)
def test_the_intent_opens_a_transcription_session_at_once(server, query):
    with server.websocket_connect(f"/v1/realtime?{query}", headers=BEARER) as socket:
        created = socket.receive_json()
    assert (created["type"], created["session"]["type"]) == ("session.created", "transcription")
    named = created["session"]["audio"]["input"]["transcription"]
    assert named == ({"model": "gpt-4o-mini-transcribe"} if "model" in query else {})


def test_a_client_secret_opens_one(server):
    form = {"type": "transcription", "audio": {"input": {"transcription": {"language": "en"}}}}
    made = server.post(SECRETS, json={"session": form}, headers=BEARER).json()
    assert made["session"]["type"] == "transcription"
    headers = {"Authorization": f"Bearer {made['value']}"}
    for path in ("/v1/realtime", "/v1/realtime?intent=transcription"):
        with server.websocket_connect(path, headers=headers) as socket:
            shown = socket.receive_json()["session"]
        assert shown["type"] == "transcription"
        assert shown["audio"]["input"]["transcription"] == {"language": "en"}
    with server.websocket_connect("/v1/realtime?intent=conversation", headers=headers) as socket:
        assert socket.receive_json()["error"]["param"] == "intent"


def test_faulty_settings_make_no_secret(server):
    form = {"type": "transcription", "instructions": "Be kind."}
    refused = server.post(SECRETS, json={"session": form}, headers=BEARER)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "session.instructions"


def test_a_conversation_does_not_become_one(server):
    with server.websocket_connect("/v1/realtime", headers=BEARER) as socket:
        socket.receive_json()
        socket.send_json({"type": "session.update", "session": {"type": "transcription"}})
        error = socket.receive_json()["error"]
    assert error["code"] == "unsupported_session_type"
    assert "intent=transcription" in error["message"]


def test_another_intent_is_refused(server):
    with server.websocket_connect("/v1/realtime?intent=dream", headers=BEARER) as socket:
        assert socket.receive_json()["error"]["code"] == "unsupported_session_type"
