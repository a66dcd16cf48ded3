"""A server without a language model: it speaks, and refuses conversations with the reason."""

import httpx
import pytest
from starlette.testclient import TestClient

from sglang_live.core import AudioDelta
from sglang_live.gateway.http.openapi import OF_LANGUAGE_MODEL
from sglang_live.gateway.native.routes import ROUTES
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of, done, tone


def app(**config):
    orchestrator = FakeOrchestrator([[AudioDelta(tone(80)), done("Hello.")]])
    return app_of(orchestrator, has_language_model=False, **config)


def client(**config) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app(**config)), base_url="http://gateway"
    )


async def test_it_speaks_and_names_its_model_and_voices():
    body = {"input": "Hello.", "model": MODEL, "response_format": "pcm"}
    spoken = await client().post("/v1/audio/speech", json=body)
    assert (spoken.status_code, spoken.content) == (200, tone(80))
    [model] = (await client().get("/v1/models")).json()["data"]
    assert model["id"] == MODEL
    voices = (await client().get("/v1/audio/voices")).json()
    assert voices == {"voices": [{"id": v, "name": v} for v in FakeOrchestrator().voices]}
    names = (await client().get("/v1/audio/voices?legacy=true")).json()
    assert names == {"voices": list(FakeOrchestrator().voices)}
    for path in ("/health", "/metrics", "/v1/capacity"):
        assert (await client().get(path)).status_code == 200


@pytest.mark.parametrize("path", [*OF_LANGUAGE_MODEL, *ROUTES])
async def test_what_needs_a_language_model_is_refused_with_the_reason(path):
    method = ROUTES.get(path, ("POST",))[0]
    refused = await client().request(method, path, json={"model": MODEL})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["code"] == "no_language_model" and "/v1/audio/speech" in error["message"]


def test_a_conversation_is_refused_with_the_reason():
    with TestClient(app()) as http, http.websocket_connect("/v1/realtime") as socket:
        event = socket.receive_json()
        assert (event["type"], event["error"]["code"]) == ("error", "no_language_model")
        closing = socket.receive()
        assert (closing["type"], closing["code"]) == ("websocket.close", 1008)


async def test_its_page_says_so_and_its_description_lacks_what_it_refuses():
    page = await client().get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/plain")
    assert "no language model" in page.text
    described = (await client().get("/openapi.json")).json()["paths"]
    assert "/v1/audio/speech" in described and not described.keys() & set(OF_LANGUAGE_MODEL)


async def test_with_keys_the_voices_need_one():
    assert (await client(api_keys=("k",)).get("/v1/audio/voices")).status_code == 401
    refused = await client(api_keys=("k",)).post("/v1/chat/completions", json={})
    assert refused.status_code == 401
