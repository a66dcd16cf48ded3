"""Requests of all shapes: each gets a response that the description of the routes allows."""

import asyncio
import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from test.unit.gateway.fakes import FakeOrchestrator, app_of
from test.unit.gateway.hostile import HOSTILE_SCHEMAS, schemas

_CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
_BEARER = {"Authorization": "Bearer k"}
_SETTINGS = settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))

without_keys = app_of(FakeOrchestrator())
with_keys = app_of(FakeOrchestrator(), api_keys=("k",))
schema = schemathesis.openapi.from_asgi("/openapi.json", without_keys)


@schema.parametrize()
@_SETTINGS
def test_every_response_is_one_that_is_described(case):
    case.call_and_validate(checks=_CHECKS)


@schema.parametrize()
@settings(_SETTINGS, max_examples=5, phases=[Phase.generate])
def test_every_response_of_a_server_with_keys_is_described(case):
    refused = case.call(app=with_keys)
    case.validate_response(refused, checks=_CHECKS)
    assert refused.status_code == 401 or case.path == "/health"
    case.validate_response(case.call(app=with_keys, headers=_BEARER), checks=_CHECKS)


# --- requests outside the description ---

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
SECRETS = "/v1/realtime/client_secrets"
HI = {"role": "user", "content": "Hi."}
# For each route a valid body, of which tests break a part.
BODIES = {
    CHAT: {"messages": [HI], "tools": [], "tool_choice": "auto", "modalities": ["text"]},
    SPEECH: {"input": "Hi.", "voice": "ada", "response_format": "pcm"},
    SECRETS: {"session": {"type": "realtime", "tools": [], "tool_choice": "auto"}},
}


def post(path: str, body: bytes, app=without_keys, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post(path, content=body, headers=headers)

    return asyncio.run(ask())


def tool(parameters) -> dict:
    function = {"name": "f", "parameters": parameters}
    return {"type": "function", **function, "function": function}


@pytest.mark.parametrize("app", [without_keys, with_keys], ids=["open", "keys"])
@pytest.mark.parametrize("path", BODIES)
@settings(_SETTINGS, max_examples=40)
@given(st.data())
def test_broken_bytes_are_refused_or_served(path, app, data):
    body = bytearray(json.dumps(BODIES[path]).encode())
    at = data.draw(st.integers(0, len(body)))
    wrong = data.draw(
        st.binary(min_size=1, max_size=4)
        | st.sampled_from([b"\xff", b"\\ud800", b"[" * 6000, b'{"x":' * 6000, b"\x00", b"1e999"])
    )
    body[at : at + data.draw(st.integers(0, 8))] = wrong
    response = post(path, bytes(body), app, **_BEARER)
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        assert response.json()["error"]["type"] == "invalid_request_error"


ODD = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({})
CHOICES = st.fixed_dictionaries(
    {"type": st.just("function")},
    optional={"function": ODD | st.just({"name": "f"}), "name": ODD | st.just("f")},
)


@pytest.mark.parametrize("path", [CHAT, SECRETS])
@settings(_SETTINGS, max_examples=60)
@given(st.sampled_from(HOSTILE_SCHEMAS) | schemas(), ODD | CHOICES)
def test_any_functions_and_any_choice_are_refused_or_served(path, parameters, choice):
    body = json.loads(json.dumps(BODIES[path]))
    (body if path == CHAT else body["session"]).update(tools=[tool(parameters)], tool_choice=choice)
    response = post(path, json.dumps(body).encode())
    assert response.status_code in (200, 400, 413), response.text
