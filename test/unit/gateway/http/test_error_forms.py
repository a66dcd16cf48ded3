"""Wherever a request fails, the answer has the protocol's form of errors."""

import json

import httpx
import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from sglang_live.gateway import app as app_module
from test.unit.gateway.fakes import FakeOrchestrator, app_of
from test.unit.gateway.live_server import listening


def http(app=None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app or app_of(FakeOrchestrator()), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def check(answer: httpx.Response, status: int, code: str) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"type", "code", "message", "param"}
    assert error["code"] == code
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/",
        "/v1/chat/completion",
        "/v1/chat/completions/",
        "/v1/realtime/sessions",
        "/v1/realtime/calls",
        "/page",
        "/page/absent.js",
        "/docs",
        "/generate",
        "/%0aforged",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_url(path, method):
    answer = await http().request(method, path)
    is_read_only = path.startswith("/page/") and method == "POST"
    check(answer, *((405, "method_not_supported") if is_read_only else (404, "unknown_url")))


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/audio/speech", "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("GET", "/v1/realtime/client_secrets", "POST"),
        ("POST", "/health", "GET"),
        ("OPTIONS", "/v1/audio/transcriptions", "POST"),
    ],
)
async def test_a_wrong_method_says_the_right_one(method, path, allowed):
    answer = await http().request(method, path)
    check(answer, 405, "method_not_supported")
    assert allowed in answer.headers["allow"]


async def test_http_at_the_websocket_says_how_to_ask():
    answer = await http().get("/v1/realtime?model=x")
    error = check(answer, 426, "upgrade_required")
    assert "WebSocket" in error["message"]
    assert answer.headers["upgrade"] == "websocket"


async def test_a_body_that_is_too_large():
    answer = await http().post("/v1/audio/speech", content=b"x" * (1 << 17))
    check(answer, 413, "request_too_large")


async def test_a_crash_of_ours_tells_no_details(monkeypatch, caplog):
    def crash(_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(app_module, "capacity_body", crash)
    error = check(await http().get("/v1/capacity"), 500, "internal_error")
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert "request_crashed" in caplog.text


@pytest.mark.parametrize(
    "path", ["/", "/realtime", "/v1/realtime/", "/v1/realtim", "/v1/chat/completions", "/page/x"]
)
def test_a_websocket_at_a_wrong_path_is_told_the_right_one(path):
    with (
        TestClient(app_of(FakeOrchestrator())) as client,
        pytest.raises(WebSocketDenialResponse) as denied,
        client.websocket_connect(path),
    ):
        pass
    assert denied.value.status_code == 404
    error = json.loads(denied.value.read())["error"]
    assert error["code"] == "unknown_url"
    assert "/v1/realtime?model=" in error["message"]


async def test_so_it_is_on_a_real_socket():
    async with listening(app_of(FakeOrchestrator())) as address, httpx.AsyncClient() as client:
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        }
        answer = await client.get(f"http://{address}/v1/realtim", headers=headers)
        check(answer, 404, "unknown_url")


# --- how a connection asks for its session ---


@pytest.mark.parametrize(
    ("query", "headers", "subprotocols", "code", "param"),
    [
        ("?voice=alloy", {}, [], "unknown_parameter", "voice"),
        ("?temperature=0", {}, [], "unknown_parameter", "temperature"),
        ("?intent=transcription", {}, [], "unsupported_session_type", "intent"),
        ("?call_id=rtc_1", {}, [], "invalid_value", "call_id"),
        ("?model=gpt-5", {}, [], "model_not_found", "model"),
        ("", {"OpenAI-Beta": "realtime=v1"}, [], "beta_api_shape_disabled", "OpenAI-Beta"),
        (
            "",
            {},
            ["realtime", "openai-beta.realtime-v1"],
            "beta_api_shape_disabled",
            "OpenAI-Beta",
        ),
    ],
)
def test_what_the_handshake_asks_for_and_cannot_have_is_one_error(
    query, headers, subprotocols, code, param
):
    with (
        TestClient(app_of(FakeOrchestrator())) as client,
        client.websocket_connect(
            f"/v1/realtime{query}", headers=headers, subprotocols=subprotocols
        ) as call,
    ):
        error = call.receive_json()["error"]
        assert (error["code"], error["param"]) == (code, param)
        with pytest.raises(WebSocketDisconnect) as closed:
            call.receive_json()
        assert closed.value.code == 1008


def test_other_betas_are_no_concern_of_a_call():
    headers = {"OpenAI-Beta": "assistants=v2"}
    with (
        TestClient(app_of(FakeOrchestrator())) as client,
        client.websocket_connect("/v1/realtime?model=fake-omni", headers=headers) as call,
    ):
        assert call.receive_json()["type"] == "session.created"
