"""Other names of the model, by which clients that cannot be told another one know it."""

import pytest
from starlette.testclient import TestClient

from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, spoken

NAMES = ("gpt-realtime*", "tts-1")


def client_of(*scripts: list, aliases: tuple[str, ...] = NAMES) -> TestClient:
    return TestClient(app_of(FakeOrchestrator(list(scripts)), aliases=aliases))


def speech(client: TestClient, model: str) -> int:
    return client.post("/v1/audio/speech", json={"model": model, "input": "Yes."}).status_code


@pytest.mark.parametrize("name", ["tts-1", "gpt-realtime", "gpt-realtime-2026"])
def test_an_alias_names_the_model_on_every_route(name):
    with client_of(spoken("Yes."), spoken("Yes.")) as client:
        assert client.get(f"/v1/models/{name}").json()["id"] == "fake-omni"
        assert speech(client, name) == 200
        chat = {
            "model": name,
            "modalities": ["text", "audio"],
            "audio": {"voice": "alloy", "format": "wav"},
            "messages": [{"role": "user", "content": "Hello."}],
        }
        assert client.post("/v1/chat/completions", json=chat).json()["model"] == "fake-omni"
        with client.websocket_connect(f"/v1/realtime?model={name}") as socket:
            assert socket.receive_json()["session"]["model"] == "fake-omni"


@pytest.mark.parametrize("name", ["tts-1-hd", "gpt-4o", "GPT-realtime"])
def test_other_names_are_unknown(name):
    with client_of(spoken("Yes.")) as client:
        assert speech(client, name) == 404
        assert client.get(f"/v1/models/{name}").status_code == 404


def test_there_is_none_by_default():
    with client_of([done()], aliases=()) as client:
        assert speech(client, "tts-1") == 404
