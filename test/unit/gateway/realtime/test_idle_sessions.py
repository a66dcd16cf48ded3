"""Sessions whose client sends nothing are closed; those with an open microphone are not."""

import asyncio

from sglang_live.clock import SimClock
from test.unit.gateway.fakes import Client, FakeOrchestrator, connected, paced, services, tone

LIMIT_S = 100.0


async def pass_time(clock: SimClock, seconds: float) -> None:
    for _ in range(round(seconds)):
        clock.advance(1.0)
        for _ in range(5):
            await asyncio.sleep(0)


async def received(client: Client) -> None:
    """Wait until the session has handled all events: its threads do not use simulated time."""
    async with asyncio.timeout(30):
        while not client.wire.incoming.empty():
            await asyncio.sleep(0.001)


def idle_after(orchestrator: FakeOrchestrator):
    return services(orchestrator, SimClock(), idle_session_s=LIMIT_S)


async def test_a_session_whose_client_sends_nothing_gets_an_error_and_is_closed():
    orchestrator = FakeOrchestrator()
    shared = idle_after(orchestrator)
    async with connected(orchestrator, shared) as client:
        await pass_time(shared.clock, LIMIT_S + 2)
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["type"]) == ("session_idle", "invalid_request_error")
        async with asyncio.timeout(30):
            while client.wire.closed is None:
                await asyncio.sleep(0.01)
        assert client.wire.closed == (1000, "session_idle")
    name = "sglang_live_gateway_clients_dropped_total"
    assert shared.metrics.registry.get_sample_value(name, {"reason": "idle"}) == 1


async def test_silence_from_an_open_microphone_keeps_a_session():
    orchestrator = FakeOrchestrator()
    shared = idle_after(orchestrator)
    async with connected(orchestrator, shared) as client:
        for _ in range(10):
            client.append(bytes(len(tone(20))))
            await received(client)
            await pass_time(shared.clock, LIMIT_S / 2)
        assert await client.settle() == []
        assert client.wire.closed is None


async def test_a_long_response_plays_to_its_end():
    words = paced("a very long story", n_frames=2000)  # 160 s
    orchestrator = FakeOrchestrator([words])
    shared = idle_after(orchestrator)
    async with connected(orchestrator, shared) as client:
        client.send("response.create")
        await client.until("response.done")
        await pass_time(shared.clock, LIMIT_S + 10)
        assert client.wire.closed is None
        await pass_time(shared.clock, 70)
        async with asyncio.timeout(30):
            while client.wire.closed is None:
                await asyncio.sleep(0.01)


async def test_without_a_limit_no_session_is_idle():
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator, SimClock())
    async with connected(orchestrator, shared) as client:
        await pass_time(shared.clock, 10_000)
        assert await client.settle() == []
