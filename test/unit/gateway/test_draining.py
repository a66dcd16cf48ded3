"""A server that is about to stop: what it refuses, what it completes, how connections close."""

import asyncio
import json
import signal

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sglang_live import shutdown
from sglang_live.gateway.draining import Drain

from .fakes import MODEL, FakeOrchestrator, app_of, spoken
from .live_server import listening

pytestmark = pytest.mark.usefixtures("must_not_hang")


def url(address: str) -> str:
    return f"ws://{address}/v1/realtime?model={MODEL}"


async def ask(socket, text: str = "hello") -> None:
    content = [{"type": "input_text", "text": text}]
    item = {"type": "message", "role": "user", "content": content}
    await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
    await socket.send(json.dumps({"type": "response.create"}))


async def until(socket, kind: str) -> dict:
    while (event := json.loads(await socket.recv()))["type"] != kind:
        pass
    return event


def response_until(gate: asyncio.Event) -> list:
    """A spoken response that ends when the gate is set."""
    *steps, last = spoken("One two three.")
    return [*steps, gate, last]


async def closed_with(socket) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            await socket.recv()
    return closed.value.rcvd.code


async def test_new_requests_are_refused_and_health_reports_the_drain():
    drain = Drain()
    async with (
        listening(app_of(FakeOrchestrator(), native_url="http://127.0.0.1:9", drain=drain)) as at,
        httpx.AsyncClient(base_url=f"http://{at}") as http,
    ):
        assert (await http.get("/health")).status_code == 200
        drain.began.set()
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert (await http.get("/metrics")).status_code == 200
        for path in ("/v1/chat/completions", "/v1/audio/speech", "/generate", "/v1/no/such"):
            refused = await http.post(path, json={})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_draining"
            assert int(refused.headers["retry-after"]) > 0
        with pytest.raises(InvalidStatus) as handshake:
            async with connect(url(at)):
                pass
        assert handshake.value.response.status_code == 503
        assert handshake.value.response.headers["retry-after"]


async def test_a_silent_session_closes_at_once():
    drain = Drain()
    async with listening(app_of(FakeOrchestrator(), drain=drain)) as at, connect(url(at)) as socket:
        await until(socket, "session.created")
        drain.began.set()
        assert await closed_with(socket) == 1012
        await drain.until_quiet()


async def test_a_running_response_is_completed_and_played_before_its_session_closes():
    drain, gate = Drain(), asyncio.Event()
    orchestrator = FakeOrchestrator([response_until(gate), spoken("Never.")])
    async with listening(app_of(orchestrator, drain=drain)) as at, connect(url(at)) as socket:
        await ask(socket)
        await until(socket, "response.output_audio.delta")
        drain.began.set()
        quiet = asyncio.create_task(drain.until_quiet())
        # No other response begins, and the session continues.
        oob = {"conversation": "none", "output_modalities": ["text"]}
        await socket.send(json.dumps({"type": "response.create", "response": oob}))
        assert (await until(socket, "error"))["error"]["code"] == "server_draining"
        assert not quiet.done()
        gate.set()
        assert (await until(socket, "response.done"))["response"]["status"] == "completed"
        assert await closed_with(socket) == 1012
        await quiet


async def test_a_response_that_does_not_end_is_not_awaited_beyond_the_limit():
    drain, never = Drain(), asyncio.Event()
    orchestrator = FakeOrchestrator([response_until(never)])
    async with listening(app_of(orchestrator, drain=drain)) as at, connect(url(at)) as socket:
        await ask(socket)
        await until(socket, "response.output_audio.delta")
        drain.began.set()
        drain.over.set()
        assert await closed_with(socket) == 1012
        await drain.until_quiet()


async def test_a_running_request_is_completed():
    drain, gate = Drain(), asyncio.Event()
    orchestrator = FakeOrchestrator([response_until(gate)])
    body = {"model": MODEL, "input": "One two three.", "voice": "alloy", "response_format": "pcm"}
    async with (
        listening(app_of(orchestrator, drain=drain)) as at,
        httpx.AsyncClient(base_url=f"http://{at}") as http,
        http.stream("POST", "/v1/audio/speech", json=body) as response,
    ):
        pieces = response.aiter_bytes()
        first = await anext(pieces)
        drain.began.set()
        quiet = asyncio.create_task(drain.until_quiet())
        await asyncio.sleep(0)
        assert not quiet.done()
        gate.set()
        rest = [piece async for piece in pieces]
        assert len(b"".join([first, *rest])) == 2 * 24_000 * 400 // 1000
        await quiet


# --- signals ---


class FakeServer:
    should_exit = force_exit = False


@pytest.fixture
async def stopping():
    """Starts to handle signals of this process for a fake server and its drain."""
    server, drain = FakeServer(), Drain()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    # The tests may run under nohup, which ignores SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def begin(drain_s: float):
        shutdown.stop_on_signals(server, drain, drain_s)
        return server, drain

    yield begin
    for number in numbers:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, before[number])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_first_signal_drains_and_the_server_ends_when_nothing_runs(stopping, number):
    server, drain = stopping(60)
    drain.begin_serving()
    signal.raise_signal(number)
    await drain.began.wait()
    await asyncio.sleep(0.01)
    assert not drain.over.is_set() and not server.should_exit
    drain.end_serving()
    await server.draining
    assert server.should_exit and not server.force_exit


async def test_the_limit_ends_a_drain(stopping, monkeypatch):
    monkeypatch.setattr(shutdown, "_CLOSING_S", 0.01)
    server, drain = stopping(0)
    drain.begin_serving()
    signal.raise_signal(signal.SIGTERM)
    await drain.over.wait()
    await server.draining
    assert server.should_exit


async def test_the_second_signal_ends_the_server_at_once(stopping):
    server, drain = stopping(60)
    drain.begin_serving()
    signal.raise_signal(signal.SIGTERM)
    await drain.began.wait()
    signal.raise_signal(signal.SIGINT)
    await drain.over.wait()
    assert server.should_exit and server.force_exit
    server.draining.cancel()
