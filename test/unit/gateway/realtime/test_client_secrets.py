"""Secrets that open sessions for a limited time, and limits per key and secret."""

import logging

import httpx
import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from sglang_live.errors import CapacityError
from sglang_live.gateway.call.turns.turn_taking import TurnTaking
from sglang_live.gateway.realtime import client_secrets
from sglang_live.gateway.realtime.client_secrets import ClientSecretForm, ClientSecrets, ExpiryForm
from test.unit.gateway.fakes import FakeOrchestrator, app_of

ROUTE = "/v1/realtime/client_secrets"
BEARER = {"Authorization": "Bearer k"}


def app(**config):
    return app_of(FakeOrchestrator(), **{"api_keys": ("k", "other"), **config})


@pytest.fixture
def server():
    with TestClient(app()) as client:
        yield client


def secret_of(client: TestClient, **body) -> str:
    response = client.post(ROUTE, json=body, headers=BEARER)
    assert response.status_code == 200, response.text
    return response.json()["value"]


def open_session(client: TestClient, key: str):
    protocols = ["realtime", f"openai-insecure-api-key.{key}"]
    return client.websocket_connect("/v1/realtime", subprotocols=protocols)


def test_a_secret_opens_sessions_with_its_settings(server):
    value = secret_of(server, session={"type": "realtime", "instructions": "Be kind."})
    assert value.startswith("ek_")
    for _ in range(2):
        with open_session(server, value) as session:
            assert session.receive_json()["session"]["instructions"] == "Be kind."
    by_header = {"Authorization": f"Bearer {value}"}
    with server.websocket_connect("/v1/realtime", headers=by_header) as session:
        assert session.receive_json()["type"] == "session.created"


def test_a_secret_opens_no_other_route(server):
    headers = {"Authorization": f"Bearer {secret_of(server)}"}
    assert server.get("/v1/models", headers=headers).status_code == 401
    assert server.post(ROUTE, json={}, headers=headers).status_code == 401
    assert server.post(ROUTE, json={}).status_code == 401


def test_an_unknown_secret_is_refused(server):
    with pytest.raises(WebSocketDenialResponse), open_session(server, "ek_wrong"):
        pass


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"expires_after": {"seconds": 5}}, "seconds"),
        ({"expires_after": {"anchor": "never"}}, "anchor"),
        ({"session": {"type": "realtime", "output_modalities": ["smell"]}}, "output_modalities"),
        ({"session": {"type": "dream"}}, "dream"),
        ({"session": 7}, "session"),
    ],
)
def test_invalid_settings_are_refused_when_the_secret_is_made(server, body, message):
    response = server.post(ROUTE, json=body, headers=BEARER)
    assert response.status_code == 400
    assert message in str(response.json()["error"])


async def test_a_secret_expires():
    now = [1000.0]
    secrets = ClientSecrets(lambda: now[0])
    form = ClientSecretForm(expires_after=ExpiryForm(seconds=30))
    secret = await secrets.make(form, owner="k")
    assert secret.expires_at_s == 1030.0
    now[0] = 1029.0
    assert await secrets.find(["x", secret.value]) is secret
    now[0] = 1030.0
    assert await secrets.find([secret.value]) is None


async def test_the_number_of_secrets_is_bounded(monkeypatch):
    monkeypatch.setattr(client_secrets, "_MAX", 2)
    now = [0.0]
    secrets = ClientSecrets(lambda: now[0])
    for _ in range(2):
        await secrets.make(ClientSecretForm(), owner="k")
    with pytest.raises(CapacityError):
        await secrets.make(ClientSecretForm(), owner="k")
    now[0] = 601.0
    await secrets.make(ClientSecretForm(), owner="k")


async def test_the_number_of_secrets_per_key_is_bounded(monkeypatch):
    monkeypatch.setattr(client_secrets, "MAX_OF_OWNER", 2)
    secrets = ClientSecrets(lambda: 0.0)
    for _ in range(2):
        await secrets.make(ClientSecretForm(), owner="k")
    with pytest.raises(CapacityError, match="of one key"):
        await secrets.make(ClientSecretForm(), owner="k")
    await secrets.make(ClientSecretForm(), owner="other")


def test_the_number_of_sessions_per_key_is_bounded():
    with TestClient(app(max_sessions_per_key=2)) as client:
        value = secret_of(client)
        with open_session(client, "k") as one, open_session(client, value) as two:
            for session in (one, two):
                assert session.receive_json()["type"] == "session.created"
            with open_session(client, "k") as refused:
                assert refused.receive_json()["error"]["code"] == "rate_limit_exceeded"
                with pytest.raises(WebSocketDisconnect) as closed:
                    refused.receive_json()
                assert closed.value.code == 1013
            with open_session(client, "other") as other:
                assert other.receive_json()["type"] == "session.created"
        with open_session(client, "k") as again:
            assert again.receive_json()["type"] == "session.created"


async def test_without_keys_secrets_still_hold_settings():
    transport = httpx.ASGITransport(app(api_keys=()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.post(ROUTE, json={"session": {"type": "realtime"}})
    assert response.json()["session"]["type"] == "realtime"


def test_no_key_and_no_secret_reaches_the_log(caplog, monkeypatch):
    def crash(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(TurnTaking, "clear", crash)
    caplog.set_level(logging.DEBUG)
    key, wrong, native = "key-0123456789", "wrong-0123456789", "native-0123456789"
    built = app(api_keys=(key,), native_url="http://127.0.0.1:1", native_api_key=native)
    with TestClient(built, raise_server_exceptions=False) as client:
        by_key, by_wrong = ({"Authorization": f"Bearer {k}"} for k in (key, wrong))
        secret = client.post(ROUTE, json={}, headers=by_key).json()["value"]
        for good in (key, secret):
            with open_session(client, good) as session:
                session.send_json({"type": "input_audio_buffer.clear"})
                session.send_text("nonsense")
                while session.receive_json().get("error", {}).get("code") != "invalid_json":
                    pass
        with pytest.raises(WebSocketDenialResponse), open_session(client, wrong):
            pass
        assert client.get("/v1/models", headers=by_wrong).status_code == 401
        assert client.post("/generate", json={"text": "x"}, headers=by_key).status_code == 503
        assert client.post(ROUTE, content=b"\xff", headers=by_key).status_code == 400
    for event in ("event_crashed", "native_unreachable", "session_closed"):
        assert event in caplog.text
    logged = caplog.text + "".join(repr(vars(record)) for record in caplog.records)
    assert not [word for word in (key, wrong, native, secret) if word in logged]


def test_the_number_of_sessions_per_secret_is_bounded_and_the_key_keeps_its_others():
    with TestClient(app(max_sessions_per_secret=2)) as client:
        value, another = secret_of(client), secret_of(client)
        with open_session(client, value) as one, open_session(client, value) as two:
            for session in (one, two):
                assert session.receive_json()["type"] == "session.created"
            with open_session(client, value) as refused:
                error = refused.receive_json()["error"]
                assert (error["code"], "secret" in error["message"]) == (
                    "rate_limit_exceeded",
                    True,
                )
                with pytest.raises(WebSocketDisconnect) as closed:
                    refused.receive_json()
                assert closed.value.code == 1013
            for good in (another, "k"):
                with open_session(client, good) as session:
                    assert session.receive_json()["type"] == "session.created"
        with open_session(client, value) as again:
            assert again.receive_json()["type"] == "session.created"
