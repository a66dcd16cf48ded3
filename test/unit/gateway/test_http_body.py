"""Clients that stop reading what they asked for."""

import asyncio

from sglang_live.gateway import http_body
from sglang_live.gateway.http_body import Streamed


async def test_a_client_that_takes_nothing_any_more_lets_the_answer_go(monkeypatch, caplog):
    monkeypatch.setattr(http_body, "STALLED_AFTER_S", 0.01)
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
