"""Bodies that are none, and clients that stop reading what they asked for."""

import asyncio

import httpx
import pytest

from sglang_live.gateway.http import body
from sglang_live.gateway.http.body import Streamed
from test.unit.gateway.fakes import FakeOrchestrator, app_of


async def test_a_client_that_takes_nothing_any_more_lets_the_answer_go(monkeypatch, caplog):
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

    async with asyncio.timeout(5):
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await Streamed(pieces())(scope, receive, send)
    assert closed == [True]
    assert "client_stalled" in caplog.text


async def test_a_client_that_reads_gets_all_of_it():
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
async def test_what_is_no_json_of_ours_is_refused_in_the_same_form_everywhere(path, body):
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.post(path, content=body)
    if path == ROUTES[-1] and (body.startswith((b'{"input', b'{"messages')) or body in (DEEP, b"")):
        assert answer.status_code in (200, 400)  # what it does not know, it does not read
        return
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": None}, {"type": "function", "function": "x"}, [], 5]
)
async def test_a_choice_of_no_function_is_refused(choice):
    body = {"messages": [{"role": "user", "content": "Hi."}], "tool_choice": choice}
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.post(ROUTES[1], json=body)
    assert answer.status_code == 400, answer.text


async def test_who_leaves_before_a_secret_was_asked_for_is_not_answered():
    async def receive():
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": ROUTES[-1], "headers": [],
             "query_string": b"", "http_version": "1.1", "scheme": "http"}  # fmt: skip
    await app_of(FakeOrchestrator())(scope, receive, send)
    assert sent[0]["status"] == 499
