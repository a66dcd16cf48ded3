"""The simulated link, on a clock that the test controls."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.l2_transfer import L2Transfer

from lab.modelled_device import clock as clock_module
from lab.modelled_device import link as link_module
from lab.modelled_device.clock import DeviceClock
from lab.modelled_device.device import ModelledDevice
from lab.modelled_device.link import ModelledLink
from sglang_live.extensions.lending.engine.peer_pool import PeerPool
from sglang_live.extensions.planner.device_model.costs import LinkCosts

N_TOKENS, BYTES_PER_TOKEN = 10, 100
LATENCY_S = 0.5
TAKES_S = LATENCY_S + 1.0  # at 1000 bytes/s
PEER_LATENCY_S = 0.1
PEER_TAKES_S = PEER_LATENCY_S + 0.1
COSTS = LinkCosts(
    to_device_gb_per_s=1e-6,
    to_device_latency_us=1e6 * LATENCY_S,
    to_host_gb_per_s=1e-6,
    to_host_latency_us=1e6 * LATENCY_S,
    peer_gb_per_s=1e-5,
    peer_latency_us=1e6 * PEER_LATENCY_S,
)


class SimClock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FakeHostPool:
    """Says when it was copied to or from, layer by layer."""

    size_per_token = 7  # of the small model: the modelled one counts

    def __init__(self):
        self.backed_up, self.loaded = 0, []

    def prepare_transfer_indices(self, host_indices, device_indices, io_backend):
        return host_indices, device_indices

    def backup_from_device_all_layer_physical(self, device_pool, host, device, io_backend):
        self.backed_up += 1

    def load_to_device_per_layer_physical(
        self, device_pool, host, device, layer_id, io_backend, is_draft=False
    ):
        self.loaded.append(layer_id)


@pytest.fixture
def clock(monkeypatch):
    clock = SimClock()
    for module in (clock_module, link_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def device(clock, tmp_path):
    costs = SimpleNamespace(kv_token_bytes=BYTES_PER_TOKEN, n_layers=48)
    model = SimpleNamespace(link=COSTS, thinker=costs)
    return ModelledDevice("thinker", model, DeviceClock(tmp_path / "clock", "thinker", 0))


@pytest.fixture
def link(device, monkeypatch):
    monkeypatch.setattr(link_module, "modelled_device", lambda: device)
    return ModelledLink("direct")


@pytest.fixture
def pool():
    return FakeHostPool()


def transfer(pool: FakeHostPool) -> list[L2Transfer]:
    slots = torch.arange(N_TOKENS)
    return [L2Transfer(pool, SimpleNamespace(), slots, slots)]


def preload(link: ModelledLink, pool: FakeHostPool):
    return link.submit_host_to_device(transfer(pool), transfer_layer_id_max=2)


def seconds(completion) -> float:
    return completion.start_event.elapsed_time(completion.finish_event) / 1000


def test_a_transfer_takes_latency_and_bytes_over_bandwidth(link, pool, clock):
    done = preload(link, pool)
    assert done.timing_enabled and seconds(done) == TAKES_S
    clock.sleep(TAKES_S - 0.01)
    assert not done.finish_event.query()
    clock.sleep(0.02)
    assert done.finish_event.query()


def test_data_is_there_when_the_end_was_observed_and_not_before(link, pool, clock):
    done = preload(link, pool)
    assert not done.finish_event.query() and pool.loaded == []
    clock.sleep(TAKES_S)
    assert pool.loaded == []
    assert done.finish_event.query() and pool.loaded == [0, 1]


def test_data_is_copied_once_however_often_the_end_is_observed(link, pool):
    done = preload(link, pool)
    done.finish_event.synchronize()
    done.finish_event.wait()
    assert done.finish_event.query() and pool.loaded == [0, 1]


@pytest.mark.parametrize("wait", ["synchronize", "wait"])
def test_waiting_for_a_transfer_lasts_to_its_end(link, pool, clock, wait):
    done = preload(link, pool)
    getattr(done.finish_event, wait)()
    assert clock.now_s == 100.0 + TAKES_S and pool.loaded == [0, 1]
    getattr(done.finish_event, wait)()
    assert clock.now_s == 100.0 + TAKES_S


def test_transfers_in_one_direction_queue_and_their_waiting_is_not_their_time(link, pool, clock):
    first, second = preload(link, pool), preload(link, pool)
    assert seconds(first) == seconds(second) == TAKES_S
    first.finish_event.synchronize()
    assert not second.finish_event.query()
    second.finish_event.synchronize()
    assert clock.now_s == 100.0 + 2 * TAKES_S


def test_a_link_that_was_idle_begins_at_once(link, pool, clock):
    preload(link, pool).finish_event.synchronize()
    clock.sleep(10)
    preload(link, pool).finish_event.synchronize()
    assert clock.now_s == 110.0 + 2 * TAKES_S


def test_the_two_directions_do_not_slow_each_other_down(link, pool, clock):
    out, back = link.submit_device_to_host(transfer(pool)), preload(link, pool)
    out.finish_event.synchronize()
    assert back.finish_event.query() and clock.now_s == 100.0 + TAKES_S


def test_a_write_reads_the_device_at_once_and_ends_later(link, pool, clock):
    done = link.submit_device_to_host(transfer(pool))
    assert pool.backed_up == 1 and not done.finish_event.query()
    done.finish_event.synchronize()
    assert pool.backed_up == 1 and seconds(done) == TAKES_S


def test_a_prefill_that_needs_its_layers_ends_a_layer_of_the_modelled_model_after_the_last_load(
    link, pool, clock, device
):
    ahead, layers = preload(link, pool), []
    done = link.submit_host_to_device(
        transfer(pool), transfer_layer_id_max=2, on_layer_done=layers.append
    )
    assert layers == [0, 1] and clock.now_s == 100.0  # the scheduler's thread does not wait
    assert not done.finish_event.query() and pool.loaded == [0, 1]
    result = device.compute(0.4, clock.now_s)
    result.synchronize()
    assert clock.now_s == pytest.approx(100.0 + 2 * TAKES_S + 0.4 / 48)
    assert done.finish_event.query() and ahead.finish_event.query()
    device.compute(0.4, clock.now_s).synchronize()  # the next batch waits for no load
    assert clock.now_s == pytest.approx(100.0 + 2 * TAKES_S + 0.4 / 48 + 0.4)


def test_a_prefill_that_is_longer_than_its_loads_takes_its_own_time(link, pool, clock, device):
    link.submit_host_to_device(
        transfer(pool), transfer_layer_id_max=2, on_layer_done=lambda layer: None
    )
    device.compute(10.0, clock.now_s).synchronize()
    assert clock.now_s == pytest.approx(110.0)


class FakeLentPool(FakeHostPool, PeerPool):
    """Pages of another engine, behind a link of their own."""

    layer_num = 1

    def __init__(self):
        FakeHostPool.__init__(self)

    prepare_transfer_indices = FakeHostPool.prepare_transfer_indices
    backup_from_device_all_layer_physical = FakeHostPool.backup_from_device_all_layer_physical
    load_to_device_per_layer_physical = FakeHostPool.load_to_device_per_layer_physical


def test_lent_pages_are_behind_a_link_of_their_own(link, pool, clock):
    from_host, from_peer = preload(link, pool), preload(link, FakeLentPool())
    assert seconds(from_peer) == pytest.approx(PEER_TAKES_S)
    from_peer.finish_event.synchronize()
    assert not from_host.finish_event.query()
    out = link.submit_device_to_host(transfer(FakeLentPool()))
    assert seconds(out) == pytest.approx(PEER_TAKES_S)


def test_a_load_from_two_tiers_ends_with_the_slower_one(link, pool):
    lent, layers = FakeLentPool(), []
    both = transfer(pool) + transfer(lent)
    done = link.submit_host_to_device(both, transfer_layer_id_max=1, on_layer_done=layers.append)
    assert layers == [0] and pool.loaded == lent.loaded == [0]
    assert seconds(done) == pytest.approx(TAKES_S)
