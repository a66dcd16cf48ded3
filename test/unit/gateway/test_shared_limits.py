"""Limits that gateways have in common, in a real server of the Valkey protocol."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import websockets
from valkey.asyncio import Valkey

from sglang_live.capacity.scaling import StageLoad
from sglang_live.errors import CapacityError
from sglang_live.gateway import rate_limits, shared_limits
from sglang_live.gateway.rate_limits import RateLimitError, TooManySessionsError
from sglang_live.gateway.realtime.client_secrets import ClientSecretForm, ClientSecrets
from sglang_live.gateway.shared_limits import SharedLimits, read_reports, slowest
from test.store_server import StoreServer

from .fakes import FakeOrchestrator, app_of, services
from .live_server import listening

_PATIENCE_S = 30.0


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_limits, "RENEW_S", 0.1)
    # A busy machine stops processes for seconds.
    monkeypatch.setattr(shared_limits, "_PATIENCE_S", 10.0)
    server = StoreServer(tmp_path)
    server.start()
    yield server
    server.kill()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def gateways(store: StoreServer, n: int = 2, **config) -> AsyncIterator[list[SharedLimits]]:
    config = {"api_keys": ("k", "other")} | config
    found = [SharedLimits(store.url, services(FakeOrchestrator(), **config)) for _ in range(n)]
    for one in found:
        one.start()
    try:
        await until(lambda: all(is_up(one) for one in found))
        await until(lambda: all(one.parts.open_sessions.n_gateways == n for one in found))
        yield found
    finally:
        for one in found:
            await one.close()


def is_up(gateway: SharedLimits) -> bool:
    return gauge(gateway, "up") == 1.0


def gauge(gateway: SharedLimits, name: str) -> float | None:
    registry = gateway.parts.metrics.registry
    return registry.get_sample_value(f"sglang_live_gateway_shared_limits_{name}")


async def granted(*openings) -> list:
    """What was granted of these, which begin at once; refusals are left out."""
    results = await asyncio.gather(*openings, return_exceptions=True)
    refused = [one for one in results if isinstance(one, Exception)]
    assert all(isinstance(one, RateLimitError) for one in refused), refused
    return [one for one in results if one not in refused]


async def test_no_two_gateways_grant_the_same_session(store):
    async with gateways(store, 4, max_sessions_per_key=7) as found:
        sessions = [one.parts.open_sessions for one in found]
        held = await granted(*(sessions[n % 4].open("k") for n in range(40)))
        assert len(held) == 7
        with pytest.raises(TooManySessionsError, match="key has 7"):
            await sessions[0].open("k")
        with await sessions[1].open("other"):
            pass
        held.pop().close()
        again = []

        async def retry() -> None:
            again.extend(await granted(sessions[0].open("k")))

        while not again:  # the end is told behind the session
            await retry()
        assert await granted(*(one.open("k") for one in sessions)) == []


async def test_sessions_of_a_client_secret_count_everywhere(store):
    async with gateways(store, max_sessions_per_key=9, max_sessions_per_secret=2) as found:
        here, there = (one.parts.open_sessions for one in found)
        with await here.open("k", "ek_1"), await there.open("k", "ek_1"):
            with pytest.raises(TooManySessionsError, match="client secret has 2"):
                await here.open("k", "ek_1")
            with await here.open("k", "ek_2"):
                pass


async def test_sessions_of_a_gateway_that_died_are_free_after_their_lease(store, monkeypatch):
    monkeypatch.setattr(shared_limits, "LEASE_S", 3.0)
    async with gateways(store, max_sessions_per_key=1) as (dead, left):
        await dead.parts.open_sessions.open("k")
        await asyncio.sleep(1.2 * shared_limits.LEASE_S)  # it lives, and renews the lease
        with pytest.raises(TooManySessionsError):
            await left.parts.open_sessions.open("k")
        await dead.close()
        async with asyncio.timeout(_PATIENCE_S):
            while not await granted(left.parts.open_sessions.open("k")):
                await asyncio.sleep(0.1)
        await until(lambda: left.parts.open_sessions.n_gateways == 1)


async def test_no_two_gateways_grant_the_same_response(store, monkeypatch):
    async with gateways(store, 4, max_responses_per_minute=9) as found:
        limits = [one.parts.rate_limits for one in found]
        statuses = await granted(*(limits[n % 4].take("k") for n in range(40)))
        assert sorted(one.remaining for one in statuses) == list(range(9))
        with pytest.raises(RateLimitError, match="9 responses") as refused:
            await limits[0].take("k")
        assert 50 < refused.value.retry_after_s <= 60
        assert (await limits[0].take("other", 9)).remaining == 0


async def test_a_minute_slides(store, monkeypatch):
    for module in (rate_limits, shared_limits):
        monkeypatch.setattr(module, "WINDOW_S", 0.5)
    async with gateways(store, max_responses_per_minute=2) as (here, there):
        assert len(await granted(*(here.parts.rate_limits.take("k") for _ in range(3)))) == 2
        with pytest.raises(RateLimitError):
            await there.parts.rate_limits.take("k")
        await asyncio.sleep(0.6)
        assert (await there.parts.rate_limits.take("k")).remaining == 1


async def test_a_turn_waits_for_nothing_and_counts(store):
    """The first at a gateway that knows nothing of the key may exceed the limit, no later one."""
    async with gateways(store, max_responses_per_minute=3) as (here, there):
        assert [here.parts.rate_limits.take_now("k").remaining for _ in range(3)] == [2, 1, 0]
        with await there.parts.open_sessions.open("k"):
            await until(lambda: there._responses._elsewhere.get("k") == 3)
            with pytest.raises(RateLimitError):
                there.parts.rate_limits.take_now("k")
        with pytest.raises(RateLimitError):
            await there.parts.rate_limits.take("k")


async def test_without_the_store_each_gateway_grants_its_part(store, caplog):
    async with gateways(store, max_sessions_per_key=5, max_responses_per_minute=4) as found:
        (here, there), leased = found, []
        leased.append(await here.parts.open_sessions.open("k"))
        store.kill()
        # Nothing waits for it, and what is open stays open.
        leased.append(await here.parts.open_sessions.open("k"))
        with pytest.raises(TooManySessionsError, match="key has 5"):
            await here.parts.open_sessions.open("k")
        await until(lambda: not is_up(there))
        assert [there.parts.rate_limits.take_now("k").remaining for _ in range(2)] == [1, 0]
        assert (await here.parts.rate_limits.take("k", 2)).remaining == 0
        for one in found:
            with pytest.raises(RateLimitError):
                await one.parts.rate_limits.take("k")
        assert gauge(here, "lost_total") == gauge(there, "lost_total") == 1
        alarms = [r for r in caplog.records if "shared_limits_lost" in r.message]
        assert len(alarms) == 2 and all(r.levelno == logging.ERROR for r in alarms)

        store.start()
        await until(lambda: is_up(here) and is_up(there))
        # The leases of before and of meanwhile are written again.
        for _ in range(3):
            leased.append(await there.parts.open_sessions.open("k"))
        assert await granted(*(one.parts.open_sessions.open("k") for one in found)) == []
        for one in leased:
            one.close()


async def test_a_store_that_hangs_delays_one_handshake_at_most(store, monkeypatch):
    monkeypatch.setattr(shared_limits, "_PATIENCE_S", 1.0)
    async with gateways(store, max_sessions_per_key=16) as (here, _):
        store.pause()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(8):  # one that waits, or a renewal before it, and none after
            await here.parts.open_sessions.open("k")
        assert loop.time() - began_s < 8 * 0.8
        assert not is_up(here)
        store.go_on()
        await until(lambda: is_up(here))


async def test_a_secret_of_one_gateway_opens_sessions_at_another(store):
    config = {"api_keys": ("k",), "max_sessions_per_secret": 1, "max_loop_lag_s": None}
    apps = [
        app_of(FakeOrchestrator(), additions=[partial(SharedLimits, store.url)], **config)
        for _ in range(2)
    ]
    async with listening(apps[0]) as here, listening(apps[1]) as there:
        settings = {"session": {"type": "realtime", "instructions": "Be kind."}}
        async with httpx.AsyncClient(headers={"authorization": "Bearer k"}) as http:
            for at in (here, there):
                async with asyncio.timeout(_PATIENCE_S):
                    while "limits_up 1.0" not in (await http.get(f"http://{at}/metrics")).text:
                        await asyncio.sleep(0.05)
            made = await http.post(f"http://{here}/v1/realtime/client_secrets", json=settings)
            value = made.json()["value"]
            bearer = {"authorization": f"Bearer {value}"}
            connect = partial(
                websockets.connect, f"ws://{there}/v1/realtime", additional_headers=bearer
            )
            async with connect() as session:
                created = json.loads(await session.recv())
                assert created["session"]["instructions"] == "Be kind."
                async with connect() as second:
                    error = json.loads(await second.recv())["error"]
                    assert error["code"] == "rate_limit_exceeded"
            # A gateway that has not this key knows none of its secrets.
            other = services(FakeOrchestrator(), api_keys=("new",))
            async with alone(SharedLimits(store.url, other)) as unrelated:
                assert await unrelated.secrets.find(value) is None
    client = Valkey.from_url(store.url)
    held = b""
    for key in await client.keys():
        held += key + (await client.get(key) if await client.type(key) == b"string" else b"")
    assert b"Be kind." in held and value.encode() not in held
    await client.aclose()


@asynccontextmanager
async def alone(gateway: SharedLimits) -> AsyncIterator[SharedLimits]:
    gateway.start()
    await until(lambda: is_up(gateway))
    yield gateway
    await gateway.close()


async def test_a_secret_that_was_made_without_the_store_is_known_once_it_is_back(store):
    async with gateways(store) as (here, there):
        ours, theirs = (ClientSecrets(shared=one.secrets) for one in (here, there))
        store.kill()
        await until(lambda: not is_up(here))
        secret = await ours.make(ClientSecretForm(), "k")
        assert await ours.find([secret.value]) == secret
        assert await theirs.find([secret.value]) is None
        store.start()
        await until(lambda: is_up(here) and is_up(there))
        found = await theirs.find(["sk-1", secret.value])
        assert found == secret


async def test_secrets_of_a_key_are_bounded_over_all_gateways(store, monkeypatch):
    monkeypatch.setattr(shared_limits, "MAX_OF_OWNER", 2)
    async with gateways(store) as (here, there):
        ours, theirs = (ClientSecrets(shared=one.secrets) for one in (here, there))
        await ours.make(ClientSecretForm(), "k")
        await theirs.make(ClientSecretForm(), "k")
        with pytest.raises(CapacityError, match="2 client secrets"):
            await ours.make(ClientSecretForm(), "k")
        await ours.make(ClientSecretForm(), "other")


async def test_the_capacity_of_the_fleet_is_the_sum_of_its_gateways(store):
    apps = [
        app_of(
            FakeOrchestrator(n_more=n),
            additions=[partial(SharedLimits, store.url)],
            max_loop_lag_s=None,
        )
        for n in (1, 2)
    ]
    async with (
        listening(apps[0]) as here,
        listening(apps[1]),
        httpx.AsyncClient(base_url=f"http://{here}") as http,
    ):

        async def fleet() -> dict:
            return (await http.get("/v1/capacity", params={"scope": "fleet"})).json()

        async with asyncio.timeout(_PATIENCE_S):
            while (found := await fleet()).get("gateways") != 2:
                await asyncio.sleep(0.05)
        assert found == {
            "object": "capacity",
            "gateways": 2,
            "sessions": {"open": 2, "limit": 8, "more": 3},
            "reason": None,
            "budget_share": 0.5,
            "stages": {
                "thinker": {"p90_s": None, "pool_share": 0.25},
                "talker": {"p90_s": None, "pool_share": 0.5},
            },
        }
        alone = (await http.get("/v1/capacity?scope=gateway")).json()
        assert alone == (await http.get("/v1/capacity")).json() and alone["sessions"]["open"] == 1
        wrong = await http.get("/v1/capacity?scope=world")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "scope")
        client = Valkey.from_url(store.url)
        loads = slowest(await read_reports(client))
        assert loads["talker"] == StageLoad(p90_s=None, pool_share=0.5)
        await client.aclose()
        store.kill()
        gone = await http.get("/v1/capacity?scope=fleet")
        assert gone.status_code == 503
        assert gone.json()["error"]["code"] == "shared_limits_unavailable"


async def test_without_shared_limits_there_is_no_fleet():
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        refused = await http.get("/v1/capacity?scope=fleet")
    assert refused.status_code == 400
    assert "--shared-limits" in refused.json()["error"]["message"]
