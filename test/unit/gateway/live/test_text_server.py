"""Claims about the operator's own text model: how it is asked, and how it fails."""

from contextlib import aclosing
from typing import Any

import pytest

from sglang_live.core import Usage
from sglang_live.errors import BadInputError
from sglang_live.gateway.live.text_server import TextServer, TextServerConfig, TextServerError
from sglang_live.gateway.live.work import BackendSettings, Task, Worked, message
from sglang_live.stages.ports import free_port
from test.unit.gateway.live.text_backend import TextBackend, called, chat, completed, said, sse

CHAT = "/v1/chat/completions"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "rain"}


def task(*items: dict[str, Any], **settings: Any) -> Task:
    return Task(
        settings=BackendSettings(**{"model": "gpt-5.6-luna", **settings}),
        instructions="Work.",
        conversation=(message("user", "And in Rome?"), message("developer", "Be kind.")),
        items=items,
    )


async def work(url: str, one: Task, **config: Any) -> tuple[list[str], Worked]:
    texts, end = [], None
    async with aclosing(
        TextServer(TextServerConfig(live_backend=url, **config)).work(one)
    ) as pieces:
        async for piece in pieces:
            if isinstance(piece, Worked):
                assert end is None
                end = piece
            else:
                texts.append(piece)
    assert end is not None
    return texts, end


async def failure(url: str, **config: Any) -> TextServerError:
    with pytest.raises(TextServerError) as caught:
        await work(url, task(), **config)
    assert "secret" not in str(caught.value)
    return caught.value


async def test_the_responses_api_is_asked_with_the_servers_own_key():
    backend = TextBackend(said("It ", "rains."))
    async with backend.serving() as url:
        one = task(CALL, OUTPUT, tools=(WEATHER,), max_output_tokens=50)
        texts, end = await work(url, one, live_backend_key="sk-own")
    assert texts == ["It ", "rains."]
    assert end == Worked(
        (), Usage(input_text_tokens=7, output_text_tokens=3, cached_tokens=2), False
    )
    assert backend.headers["authorization"] == "Bearer sk-own"
    [asked] = backend.asked
    assert asked == {
        "model": "gpt-5.6-luna",
        "instructions": "Work.",
        "input": [message("user", "And in Rome?"), message("developer", "Be kind."), CALL, OUTPUT],
        "tools": [{**WEATHER, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": 50,
        "stream": True,
        "store": False,
    }


async def test_it_calls_several_functions_at_once():
    backend = TextBackend(called(("weather", '{"town": "Rome"}'), ("weather", "")))
    async with backend.serving() as url:
        texts, end = await work(url, task(), live_backend_model="luna")
    assert texts == []
    assert end.calls == (
        '{"name": "weather", "arguments": "{\\"town\\": \\"Rome\\"}"}',
        '{"name": "weather", "arguments": "{}"}',
    )
    assert backend.asked[0]["model"] == "luna"
    assert "authorization" not in backend.headers and "tools" not in backend.asked[0]


async def test_chat_completions_are_asked_in_their_form():
    parts = [
        {"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": '{"to'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'wn": "Rome"}'}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "weather"}}]},
    ]
    backend = TextBackend(chat({"content": "One "}, {"content": "moment."}, *parts))
    async with backend.serving(CHAT) as url:
        choice = {"type": "function", "name": "weather"}
        one = task(CALL, {**CALL, "call_id": "b"}, OUTPUT, tools=(WEATHER,), tool_choice=choice)
        texts, end = await work(url, one)
    assert texts == ["One ", "moment."]
    assert len(end.calls) == 2 and not end.is_cut
    assert end.usage == Usage(input_text_tokens=7, output_text_tokens=3)
    [asked] = backend.asked
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    [tool] = asked["tools"]
    assert tool["function"] == {"name": "weather", "parameters": {"type": "object"}}
    assert [one["role"] for one in asked["messages"]] == [
        *("system", "user", "system", "assistant", "tool"),
    ]
    assert [call["id"] for call in asked["messages"][3]["tool_calls"]] == ["a", "b"]


@pytest.mark.parametrize(
    "path,answer",
    [
        ("/v1/responses", sse(completed("incomplete"))),
        (CHAT, chat({"content": "One"}, finish="length")),
    ],
)
async def test_a_response_that_is_cut_says_so(path, answer):
    async with TextBackend(answer).serving(path) as url:
        _, end = await work(url, task())
    assert end.is_cut


@pytest.mark.parametrize(
    "answer,code",
    [
        (401, "backend_refused"),
        (404, "backend_refused"),
        (302, "backend_refused"),
        (429, "backend_unavailable"),
        (503, "backend_unavailable"),
        (b"data: {no json\n\n", "backend_malformed"),
        (b'data: {"type": 3}\n\n', "backend_malformed"),
        (b'data: ["a"]\n\n', "backend_malformed"),
        (b"\xff\xfe", "backend_malformed"),
        (sse({"type": "response.output_text.delta", "delta": "It"}), "backend_malformed"),
        (b"", "backend_malformed"),
        (sse({"type": "response.failed", "response": {}}), "backend_failed"),
        (sse({"type": "error", "message": "sk-secret"}), "backend_failed"),
        (b"data: " + b"x" * (5 << 20), "backend_oversized"),
        (said("x" * (5 << 20)), "backend_oversized"),
        (called(*[("weather", "{}")] * 65), "backend_oversized"),
        (0.5, "backend_timeout"),
    ],
)
async def test_each_failure_has_a_name(answer, code):
    async with TextBackend(answer).serving() as url:
        error = await failure(
            url, live_backend_timeout_s=0.2 if code == "backend_timeout" else 20.0
        )
    assert (error.code, error.http_status) == (code, 502)


@pytest.mark.parametrize(
    "answer,code",
    [
        (b"data: [1]\n\n", "backend_malformed"),
        (b"data: [DONE]\n\n", "backend_malformed"),
        (sse({"error": {"message": "sk-secret"}}), "backend_failed"),
    ],
)
async def test_each_failure_of_chat_completions_has_a_name(answer, code):
    async with TextBackend(answer).serving(CHAT) as url:
        assert (await failure(url)).code == code


async def test_a_server_that_is_down_is_unavailable():
    error = await failure(f"http://127.0.0.1:{free_port()}/v1/responses")
    assert error.code == "backend_unavailable"


@pytest.mark.parametrize("url", ["x", "ftp://a/v1/responses", "http:///responses", "http://a/v1"])
def test_only_urls_of_a_known_api_are_accepted(url):
    with pytest.raises(BadInputError):
        TextServerConfig(live_backend=url)


def test_a_key_fits_into_a_header():
    with pytest.raises(BadInputError):
        TextServerConfig(live_backend="http://a/responses", live_backend_key="a\nb")
