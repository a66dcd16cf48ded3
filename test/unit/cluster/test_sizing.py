"""Numbers of hosts that follow the calls, by what gateways report in a real store."""

import logging

import msgspec
import pytest
from valkey.asyncio import Valkey

from sglang_live.capacity.scaling import GatewayLoad, Host
from sglang_live.cluster.sizing import Sizing
from sglang_live.cluster.spec import ClusterSpec, GatewayGroup, HostGroup, HostScaling
from sglang_live.gateway import shared_limits
from sglang_live.gateway.shared_limits import GatewayReport
from test.store_server import StoreServer

COLD_START_S, SHRINKS_S = 100.0, 600.0
NOTHING: dict[str, dict[str, int]] = {}


@pytest.fixture
def store(tmp_path):
    server = StoreServer(tmp_path)
    server.start()
    yield server
    server.kill()


def spec_of(store: StoreServer, *zones: str) -> ClusterSpec:
    scaling = HostScaling(sessions=10, most=50, cold_start_s=COLD_START_S)
    return ClusterSpec(
        model_path="demo",
        zones=list(zones),
        hosts=[
            HostGroup(name="think", stages=["thinker"]),
            HostGroup(name="voice", stages=["talker", "vocoder"], scaling=scaling),
        ],
        gateways=GatewayGroup(flags=["--shared-limits", store.url]),
    )


async def report(store: StoreServer, n_open: int, *gateways: str) -> None:
    """Each of these gateways has n_open sessions."""
    load = GatewayLoad(
        n_open=n_open, limit=500, why="", share=0.5, arrivals_per_s=0.0, ends_per_s=0.0
    )
    said = msgspec.json.encode(GatewayReport(load=load, n_more=1, stages={}))
    async with Valkey.from_url(store.url) as client:
        for name in gateways:
            await client.zadd(shared_limits._GATEWAYS, {name: 1e15})
            await client.set(f"{shared_limits._PREFIX}report:{name}", said)


def host(zone: str, **values) -> Host:
    return Host(name=f"voice-{zone}", pool="voice", zone=zone, **{"n_open": 0} | values)


async def test_hosts_are_as_many_as_the_calls_of_all_gateways_need(store):
    sizing = Sizing(spec_of(store), 0.0)
    await report(store, 40, "one", "two")
    # 80 calls of which each host has 10, and is to have 8.5.
    assert await sizing.sizes(0.0, NOTHING, [], 2) == {"voice": {"": 10}}
    await report(store, 100, "one")
    assert await sizing.sizes(5.0, {"voice": {"": 10}}, [], 2) == {"voice": {"": 17}}
    await sizing.close()


async def test_they_get_fewer_once_all_gateways_have_reported_for_ten_minutes(store):
    sizing, before = Sizing(spec_of(store), 0.0), {"voice": {"": 9}}
    await report(store, 10, "one")
    for now_s in (0.0, SHRINKS_S - 1.0):
        assert await sizing.sizes(now_s, before, [], 1) == before
    assert await sizing.sizes(SHRINKS_S, before, [], 2) == before, "one has not reported"
    assert await sizing.sizes(SHRINKS_S + 5.0, before, [], 1) == before
    assert await sizing.sizes(2 * SHRINKS_S + 5.0, before, [], 1) == {"voice": {"": 2}}
    await sizing.close()


async def test_without_the_store_they_stay_and_that_is_said_once(store, caplog):
    sizing, before = Sizing(spec_of(store), 0.0), {"voice": {"": 4}}
    await report(store, 400, "one")
    store.kill()
    with caplog.at_level(logging.ERROR):
        for now_s in (0.0, 5.0):
            assert await sizing.sizes(now_s, before, [], 1) == before
    assert len(caplog.records) == 1 and "reports_unreadable" in caplog.text
    store.start()
    await report(store, 400, "one")
    assert await sizing.sizes(10.0, before, [], 1) == {"voice": {"": 48}}
    await sizing.close()


async def test_what_a_lost_zone_had_comes_in_the_others_and_there_all_stays(store):
    sizing = Sizing(spec_of(store, "a", "b"), 0.0)
    await report(store, 40, "one")
    both = [host("a"), host("b")]
    assert await sizing.sizes(0.0, NOTHING, both, 1) == {"voice": {"a": 4, "b": 4}}
    one = [host("a"), host("b", state="starting")]
    before = {"voice": {"a": 4, "b": 4}}
    assert await sizing.sizes(COLD_START_S, before, one, 1) == before
    lost = await sizing.sizes(COLD_START_S + 1.0, before, one, 1)
    assert lost == {"voice": {"a": 8, "b": 4}}
    none = [host("a", state="starting"), host("b", state="starting")]
    assert await sizing.sizes(9 * COLD_START_S, before, none, 1) == {"voice": {"a": 4, "b": 4}}
    await sizing.close()
