"""Every failed request has a response in the protocol's form of errors."""

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


def check(response: httpx.Response, status: int, code: str) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
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
        "/v1/realtime/call",
        "/page",
        "/page/absent.js",
        "/docs",
        "/generate",
        "/%0aforged",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_url(path, method):
    response = await http().request(method, path)
    is_read_only = path.startswith("/page/") and method == "POST"
    check(response, *((405, "method_not_supported") if is_read_only else (404, "unknown_url")))


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
async def test_the_error_for_a_wrong_method_names_the_right_one(method, path, allowed):
    response = await http().request(method, path)
    check(response, 405, "method_not_supported")
    assert allowed in response.headers["allow"]


async def test_http_at_the_websocket_gets_the_upgrade_to_send():
    response = await http().get("/v1/realtime?model=x")
    error = check(response, 426, "upgrade_required")
    assert "WebSocket" in error["message"]
    assert response.headers["upgrade"] == "websocket"


async def test_a_body_that_is_too_large():
    response = await http().post("/v1/audio/speech", content=b"x" * (1 << 17))
    check(response, 413, "request_too_large")


async def test_the_error_for_a_crash_has_no_details(monkeypatch, caplog):
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
def test_the_error_for_a_websocket_at_a_wrong_path_names_the_right_one(path):
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


async def test_a_real_socket_at_a_wrong_path_gets_the_same_error():
    async with listening(app_of(FakeOrchestrator())) as address, httpx.AsyncClient() as client:
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        }
        response = await client.get(f"http://{address}/v1/realtim", headers=headers)
        check(response, 404, "unknown_url")


# --- handshakes of the realtime route ---


@pytest.mark.parametrize(
    ("query", "headers", "subprotocols", "code", "param"),
    [
        ("?voice=alloy", {}, [], "unknown_parameter", "voice"),
        ("?temperature=0", {}, [], "unknown_parameter", "temperature"),
        ("?intent=dream", {}, [], "unsupported_session_type", "intent"),
        ("?call_id=rtc_1", {}, [], "call_not_found", "call_id"),
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
def test_a_handshake_with_an_unsupported_parameter_gets_one_error(
    query, headers, subprotocols, code, param
):
    with (
        TestClient(app_of(FakeOrchestrator())) as client,
        client.websocket_connect(
            f"/v1/realtime{query}", headers=headers, subprotocols=subprotocols
        ) as socket,
    ):
        error = socket.receive_json()["error"]
        assert (error["code"], error["param"]) == (code, param)
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
        assert closed.value.code == 1008


def test_headers_of_other_betas_have_no_effect():
    headers = {"OpenAI-Beta": "assistants=v2"}
    with (
        TestClient(app_of(FakeOrchestrator())) as client,
        client.websocket_connect("/v1/realtime?model=fake-omni", headers=headers) as socket,
    ):
        assert socket.receive_json()["type"] == "session.created"
