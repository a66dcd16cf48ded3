"""The simulated link, on a clock that the test controls."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.l2_transfer import L2Transfer

from sglang_live.bridge.tiers import modelled_link
from sglang_live.bridge.tiers.modelled_link import LINK_ENV, ModelledLink, link_from_env

N_TOKENS, BYTES_PER_TOKEN = 10, 100
LATENCY_S = 0.5
TAKES_S = LATENCY_S + 1.0  # at 1000 bytes/s


class SimClock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FakeHostPool:
    """Says when it was copied to or from, layer by layer."""

    size_per_token = BYTES_PER_TOKEN

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
    monkeypatch.setattr(modelled_link, "time", clock)
    return clock


@pytest.fixture
def link(clock):
    return ModelledLink("direct", bytes_per_s=1000.0, latency_s=LATENCY_S)


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


def test_a_prefill_that_needs_its_layers_waits_for_all_before_it(link, pool, clock):
    ahead = preload(link, pool)
    layers = []
    done = link.submit_host_to_device(
        transfer(pool), transfer_layer_id_max=2, on_layer_done=layers.append
    )
    assert clock.now_s == 100.0 + 2 * TAKES_S
    assert layers == [0, 1] and done.finish_event.query()
    assert ahead.finish_event.query() and pool.loaded == [0, 1, 0, 1]


def test_without_the_variable_there_is_no_simulated_link(monkeypatch):
    monkeypatch.delenv(LINK_ENV, raising=False)
    assert link_from_env("direct") is None
    monkeypatch.setenv(LINK_ENV, "")
    assert link_from_env("direct") is None


def test_the_variable_is_read_in_gigabytes_and_microseconds(monkeypatch, clock, pool):
    monkeypatch.setenv(LINK_ENV, "0.000001:2000")
    done = preload(link_from_env("direct"), pool)
    assert seconds(done) == pytest.approx(1.002)


@pytest.mark.parametrize(
    "text",
    ["fast", "10", "10:", ":5", "10:5:1", "0:5", "-1:5", "inf:5", "nan:5", "10:-1", "10:inf"],
)
def test_a_malformed_link_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv(LINK_ENV, text)
    with pytest.raises(ValueError, match=LINK_ENV):
        link_from_env("direct")
