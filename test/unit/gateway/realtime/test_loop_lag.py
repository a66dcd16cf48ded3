"""Sessions are refused while the event loop is late, and open ones go on."""

import asyncio

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from sglang_live.clock import SimClock
from sglang_live.errors import CapacityError
from sglang_live.gateway.parts import LoopLag
from sglang_live.gateway.realtime.route import realtime_link
from sglang_live.telemetry.metrics import GatewayMetrics
from test.unit.gateway.fakes import (
    Client,
    FakeOrchestrator,
    MemoryWire,
    app_of,
    connected,
    services,
)


def lag_of(clock: SimClock, limit_s: float | None = 0.2) -> LoopLag:
    return LoopLag(clock, GatewayMetrics(CollectorRegistry()), limit_s)


def refuses(lag: LoopLag) -> bool:
    try:
        lag.check()
    except CapacityError as error:
        assert error.retry_after_s is not None
        return True
    return False


def test_lasting_lag_refuses_until_it_is_over():
    lag = lag_of(SimClock())
    assert not refuses(lag)
    for _ in range(40):
        lag.observe(0.5)
    assert refuses(lag)
    for _ in range(400):
        lag.observe(0.0)
    assert not refuses(lag)


@pytest.mark.parametrize("stall_s", [0.05, 0.3, 1.0])
def test_one_stall_refuses_no_session(stall_s):
    lag = lag_of(SimClock())
    for _ in range(100):
        lag.observe(0.001)
    lag.observe(stall_s)
    assert not refuses(lag)


async def test_the_lag_is_watched_again_after_an_error(monkeypatch):
    clock = SimClock()
    lag = lag_of(clock)
    with monkeypatch.context() as broken:
        broken.setattr(lag, "observe", lambda _lag_s: 1 / 0)
        lag.start()
        await passes(clock, 0.1)
    for _ in range(20):
        await passes(clock, 1.0)
    assert refuses(lag)
    lag.close()


async def passes(clock: SimClock, seconds: float) -> None:
    for _ in range(6):
        await asyncio.sleep(0)
    clock.advance(seconds)
    for _ in range(6):
        await asyncio.sleep(0)


def test_without_a_limit_nothing_is_refused():
    lag = lag_of(SimClock(), limit_s=None)
    for _ in range(400):
        lag.observe(10.0)
    assert lag.mean_s > 9 and not refuses(lag)


def test_capacity_has_no_room_while_the_loop_is_late():
    lag = lag_of(SimClock())
    now = FakeOrchestrator(n_more=3).capacity_now()
    assert lag.limited(now) == now
    for _ in range(40):
        lag.observe(0.5)
    late = lag.limited(now)
    assert late.n_more == 0 and "listen" in late.why


async def test_the_lag_is_that_of_a_timer():
    clock = SimClock()
    lag = lag_of(clock)
    lag.start()
    for _ in range(50):
        await asyncio.sleep(0)
        clock.advance(0.55)
        await asyncio.sleep(0)
    assert lag.mean_s == pytest.approx(0.5, rel=0.02)
    lag.close()


async def test_a_refused_session_is_told_why_and_an_open_one_goes_on():
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator)
    async with connected(orchestrator, shared=shared) as client:
        for _ in range(40):
            shared.loop_lag.observe(1.0)
        wire = MemoryWire()
        await realtime_link(wire, shared).run()
        error = (await Client(wire).next())["error"]
        assert error["code"] == "server_overloaded" and "listen" in error["message"]
        assert wire.closed == (1013, "server_overloaded")
        client.send("response.create")
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
    assert orchestrator.session.n_closed == 1


def test_the_lag_is_in_the_metrics():
    with TestClient(app_of(FakeOrchestrator())) as client:
        assert "sglang_live_gateway_loop_lag_seconds" in client.get("/metrics").text
