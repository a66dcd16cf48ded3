"""How long a prefill waits for KV that is loaded layer by layer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.kv.layered_load import LayeredLoad


def load_of(load_s: float, compute_s: float, **other: float) -> LayeredLoad:
    """10 layers; the whole load takes load_s on a link that is free."""
    return LayeredLoad(
        n_bytes=1000,
        n_layers=10,
        bytes_per_s=1000 / load_s,
        queue_s=other.get("queue_s", 0.0),
        encoder_s=other.get("encoder_s", 0.0),
        compute_s=compute_s,
    )


def stall_of(load: LayeredLoad) -> float:
    """Layer by layer."""
    arrives_s, ends_s = load.queue_s, load.encoder_s
    for _ in range(load.n_layers):
        arrives_s += load.n_bytes / load.bytes_per_s / load.n_layers
        ends_s = max(ends_s, arrives_s) + load.compute_s / load.n_layers
    return ends_s - load.encoder_s - load.compute_s


@given(
    load_s=st.floats(1e-4, 10.0),
    compute_s=st.floats(1e-4, 10.0),
    queue_s=st.floats(0.0, 1.0),
    encoder_s=st.floats(0.0, 1.0),
)
def test_the_wait_is_that_of_layers_one_after_another(load_s, compute_s, queue_s, encoder_s):
    load = load_of(load_s, compute_s, queue_s=queue_s, encoder_s=encoder_s)
    assert load.stall_s == pytest.approx(stall_of(load), abs=1e-9)


def test_layers_that_arrive_faster_than_they_compute_are_hidden_but_for_the_first():
    assert load_of(0.1, 0.1).stall_s == pytest.approx(0.01)


def test_slower_layers_delay_by_what_the_load_takes_beyond_all_but_one():
    assert load_of(0.2, 0.1).stall_s == pytest.approx(0.2 - 0.09)


def test_an_encoder_hides_a_load_and_a_queue_delays_it():
    assert load_of(0.2, 0.1, encoder_s=0.2).stall_s == 0.0
    assert load_of(0.1, 0.1, queue_s=0.5).stall_s == pytest.approx(0.51)


@given(load_s=st.floats(0.01, 1.0), compute_s=st.floats(0.01, 1.0))
def test_what_is_hidden_waits_for_its_first_layer_alone(load_s, compute_s):
    load = load_of(load_s, compute_s)
    hidden = replace(load, n_bytes=load.hidden_bytes)
    assert hidden.stall_s <= 0.1 * compute_s + 1e-9
    more = replace(load, n_bytes=2 * load.hidden_bytes + 100)
    assert more.stall_s > 0.1 * compute_s
