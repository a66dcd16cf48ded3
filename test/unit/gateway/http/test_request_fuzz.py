"""Slightly wrong HTTP bodies: served, or one error in the protocol's form."""

import asyncio
import json
import os

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from test.protocol.ga_events import client_secret_requests
from test.unit.gateway.fakes import FakeOrchestrator, app_of
from test.unit.gateway.realtime.test_event_fuzz import mutated

from .test_tool_schema_by_route import CALLED, CHAT, CHAT_TABLE, HI, REFUSED, SPEECH, SPOKEN, TOOL

# More by hand: N_FUZZED=20000.
N_FUZZED = int(os.environ.get("N_FUZZED", "300"))
SECRETS = "/v1/realtime/client_secrets"
MESSAGES = [
    HI,
    {"role": "assistant", "tool_calls": [CALLED]},
    {"role": "tool", "content": "x", "tool_call_id": "c1"},
    {"role": "user", "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": None}]},
]
CHATS = [
    SPOKEN | {"messages": MESSAGES, "tools": [TOOL]} | {name: value}
    for name, outcomes in CHAT_TABLE.items()
    for outcome, values in outcomes.items()
    if outcome != REFUSED
    for value in values
]
VALID = {
    CHAT: CHATS,
    SPEECH: [{"input": "Hi.", "voice": {"id": "ada"}, "response_format": "pcm", "speed": 1.0}],
    SECRETS: list(client_secret_requests()),
}
app = app_of(FakeOrchestrator())


@pytest.mark.parametrize("path", VALID)
@settings(
    max_examples=N_FUZZED,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_a_slightly_wrong_body_is_served_or_refused_with_its_parameter(path, data):
    body = data.draw(mutated(VALID[path]))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post(path, content=json.dumps(body))

    response = asyncio.run(ask())
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"] and error["code"]
        is_named = error["param"] is not None or "surrogate" in error["message"]
        assert is_named or error["code"] in ("invalid_json", "model_not_found"), (body, error)
