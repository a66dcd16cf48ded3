"""A text model behind a URL, scripted: what it is asked, and what it answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def said(*texts: str) -> bytes:
    """A response of the Responses API."""
    deltas = [{"type": "response.output_text.delta", "delta": text} for text in texts]
    return sse({"type": "response.created", "response": {}}, *deltas, completed())


def completed(kind: str = "completed") -> dict[str, Any]:
    usage = {"input_tokens": 7, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 2}}
    return {"type": f"response.{kind}", "response": {"id": "resp_1", "usage": usage}}


def called(*calls: tuple[str, str]) -> bytes:
    items = [
        {"type": "function_call", "call_id": f"its_{n}", "name": name, "arguments": arguments}
        for n, (name, arguments) in enumerate(calls)
    ]
    done = [{"type": "response.output_item.done", "item": item} for item in items]
    return sse(*done, completed())


def chat(*deltas: dict[str, Any], finish: str = "stop") -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    return sse(*chunks, end, usage) + b"data: [DONE]\n\n"


class TextBackend:
    """
    answers: bodies, in order; an int is a status, a float a delay in seconds.
    asked: bodies of the requests. headers: of the last one.
    """

    def __init__(self, *answers: bytes | int | float):
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        answer = self.answers.pop(0)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = said("late")
        if isinstance(answer, int):
            return web.Response(status=answer, text="sk-secret of the backend")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        half = len(answer) // 2  # within an event
        for piece in (answer[:half], answer[half:]):
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    @asynccontextmanager
    async def serving(self, path: str = "/v1/responses") -> AsyncIterator[str]:
        """Its URL."""
        app = web.Application()
        app.router.add_post(path, self.answer)
        async with TestServer(app) as server:
            yield str(server.make_url(path))
