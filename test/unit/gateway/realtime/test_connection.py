"""The beginning and the end of a connection."""

import asyncio

import pytest

from sglang_live.core import AudioDelta
from sglang_live.errors import StageUnavailableError
from sglang_live.gateway.realtime.route import realtime_link
from test.unit.gateway.fakes import (
    Client,
    FakeOrchestrator,
    MemoryWire,
    connected,
    full,
    services,
    tone,
)

# Longer than the 2 s that the server allows itself, for a loaded machine.
_GONE_S = 2.0


async def refused(error: Exception) -> tuple[dict, tuple[int, str] | None]:
    wire = MemoryWire()
    shared = services(FakeOrchestrator(refuse_with=error))
    await realtime_link(wire, shared).run()
    return await Client(wire).next(), wire.closed


@pytest.mark.parametrize(
    ("error", "code", "close"),
    [
        (full(), "server_overloaded", 1013),
        (StageUnavailableError("talker is down"), "stage_unavailable", 1013),
        (RuntimeError("a bug"), "internal_error", 1011),
    ],
)
async def test_a_session_that_cannot_open_is_an_error_event_then_a_close(error, code, close):
    event, closed = await refused(error)
    assert event["type"] == "error"
    assert event["error"]["type"] == "server_error"
    assert event["error"]["code"] == code
    assert closed == (close, code)
    assert "a bug" not in event["error"]["message"]


async def test_events_sent_before_session_created_are_handled():
    wire = MemoryWire()
    client = Client(wire)
    client.update(instructions="early")
    serving = asyncio.create_task(realtime_link(wire, services(FakeOrchestrator())).run())
    await client.expect("session.created")
    assert (await client.expect("session.updated"))["session"]["instructions"] == "early"
    client.send_raw(None)
    await serving


async def test_a_client_that_leaves_during_a_response_frees_its_session():
    orchestrator = FakeOrchestrator([[AudioDelta(tone(100)), asyncio.Event()], [asyncio.Event()]])
    async with connected(orchestrator) as client:
        client.send("response.create")
        await client.until("response.output_audio.delta")
        client.send("response.create", response={"conversation": "none"})
        await client.until("response.created")
        await client.settle()
        client.send_raw(None)  # connected() then checks that session and turns are closed
    assert orchestrator.session.n_cancelled == 2


async def test_a_stage_that_does_not_end_a_turn_delays_the_close_only_briefly(caplog):
    orchestrator = FakeOrchestrator([[asyncio.Event()]])
    wire = MemoryWire()
    client = Client(wire)
    serving = asyncio.create_task(realtime_link(wire, services(orchestrator)).run())
    await client.expect("session.created")
    orchestrator.session.wind_down = asyncio.Event()  # never set
    client.send("response.create")
    await client.until("response.created")
    await client.settle()
    client.send_raw(None)
    async with asyncio.timeout(_GONE_S):
        await serving
    assert orchestrator.session.n_closed == 1


async def test_a_client_that_does_not_read_is_dropped_before_it_fills_the_memory():
    orchestrator = FakeOrchestrator([[AudioDelta(tone(200)) for _ in range(100)]])
    shared = services(orchestrator, send_buffer_bytes=100_000)
    wire = MemoryWire()
    client = Client(wire)
    serving = asyncio.create_task(realtime_link(wire, shared).run())
    await client.expect("session.created")
    wire.readable.clear()
    client.send("response.create")
    async with asyncio.timeout(_GONE_S):
        await serving
    assert wire.closed == (1008, "client does not read")
    assert len(wire.frames) == 1
    assert orchestrator.session.n_closed == 1
    dropped = "sglang_live_gateway_clients_dropped_total"
    registry = shared.metrics.registry
    assert registry.get_sample_value(dropped, {"reason": "slow_reader"}) == 1


async def test_a_socket_that_breaks_while_sending_ends_the_connection():
    class BrokenWire(MemoryWire):
        async def send(self, frame: str) -> None:
            raise ConnectionResetError

    orchestrator = FakeOrchestrator()
    async with asyncio.timeout(_GONE_S):
        await realtime_link(BrokenWire(), services(orchestrator)).run()
    assert orchestrator.session.n_closed == 1


async def test_a_session_that_fails_to_close_is_logged_and_not_counted_as_open(caplog):
    orchestrator = FakeOrchestrator()
    wire = MemoryWire()
    shared = services(orchestrator)
    serving = asyncio.create_task(realtime_link(wire, shared).run())
    client = Client(wire)
    await client.expect("session.created")

    async def broken_close():
        raise RuntimeError("stage gone")

    orchestrator.session.close = broken_close
    client.send_raw(None)
    await serving
    assert "stage gone" in caplog.text
    assert shared.metrics.registry.get_sample_value("sglang_live_gateway_sessions_open") == 0
