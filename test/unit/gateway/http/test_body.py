"""Malformed bodies, and clients that stop reading or leave."""

import asyncio

import httpx
import pytest

from sglang_live.gateway.http import body
from sglang_live.gateway.http.body import Streamed
from test.unit.gateway.fakes import FakeOrchestrator, app_of


async def test_a_client_that_stops_reading_ends_its_response(monkeypatch, caplog):
    monkeypatch.setattr(body, "STALLED_AFTER_S", 0.01)
    closed = []

    async def pieces():
        try:
            while True:
                yield b"sound"
        finally:
            closed.append(True)

    taken = []

    async def send(message):
        taken.append(message)
        if len(taken) == 3:
            await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    async with asyncio.timeout(30):
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await Streamed(pieces())(scope, receive, send)
    assert closed == [True]
    assert "client_stalled" in caplog.text


async def test_a_client_that_reads_gets_the_whole_response():
    async def pieces():
        for n in range(3):
            yield bytes([n])

    taken = []

    async def send(message):
        taken.append(message.get("body", b""))

    async def receive():
        await asyncio.Event().wait()

    await Streamed(pieces())({"type": "http"}, receive, send)
    assert b"".join(taken) == bytes([0, 1, 2])


DEEP = b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}"
ROUTES = ("/v1/audio/speech", "/v1/chat/completions", "/v1/realtime/client_secrets")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [DEEP, b"\xff", b'{"input": "\xff"}', b'{"messages": [{"role": "user", "content": "\xff"}]}',
     b'{"session": {"type": "\xff"}}', b'{"input": "\\ud800"}', b"", b"[]", b"nonsense"],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
async def test_a_body_of_the_wrong_form_is_refused_in_the_same_form_by_every_route(path, body):
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.post(path, content=body)
    if path == ROUTES[-1] and (body.startswith((b'{"input', b'{"messages')) or body in (DEEP, b"")):
        assert response.status_code in (200, 400)  # this route has no such fields
        return
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": None}, {"type": "function", "function": "x"}, [], 5]
)
async def test_a_choice_of_no_function_is_refused(choice):
    body = {"messages": [{"role": "user", "content": "Hi."}], "tool_choice": choice}
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.post(ROUTES[1], json=body)
    assert response.status_code == 400, response.text


async def test_a_client_that_leaves_before_its_body_was_read_gets_499():
    async def receive():
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": ROUTES[-1], "headers": [],
             "query_string": b"", "http_version": "1.1", "scheme": "http"}  # fmt: skip
    await app_of(FakeOrchestrator())(scope, receive, send)
    assert sent[0]["status"] == 499
