"""A Ray cluster that would end calls with its head, or obey anyone, is named so."""

import pytest

from sglang_live.cluster.safety import NICENESS_ENV, RECONNECT_ENV, NodeFacts, RayFacts

SAFE_NODE = NodeFacts(reconnects="600", niceness=0)
SAFE = RayFacts(
    store="redis",
    nodes={"192.0.2.1": SAFE_NODE, "192.0.2.2": SAFE_NODE},
    environment={"RAY_AUTH_MODE": "token", "RAY_USE_TLS": "1"},
)


def faults(**changes) -> str:
    given = {name: getattr(SAFE, name) for name in ("store", "nodes", "environment")}
    return "\n".join(RayFacts(**given | changes).faults())


def test_a_safe_cluster_has_no_faults():
    assert faults() == ""


@pytest.mark.parametrize("store", ["", "memory"])
def test_a_head_without_a_store_is_refused(store):
    assert "RAY_REDIS_ADDRESS" in faults(store=store)


@pytest.mark.parametrize(("limit", "named"), [("", "60 s"), ("299", "299 s"), ("soon", "60 s")])
def test_a_node_that_ends_soon_after_the_head_is_refused(limit, named):
    node = NodeFacts(reconnects=limit, niceness=0)
    told = faults(nodes={"192.0.2.1": SAFE_NODE, "192.0.2.2": node})
    assert f"node 192.0.2.2 ends {named} after the head" in told and f"{RECONNECT_ENV}=600" in told


def test_a_node_whose_processes_wait_for_all_others_is_refused():
    node = NodeFacts(reconnects="600", niceness=15)
    assert f"at niceness 15: start Ray there with {NICENESS_ENV}=0" in faults(nodes={"::1": node})


def test_other_machines_need_a_token_and_tls():
    told = faults(environment={})
    assert "RAY_AUTH_MODE=token" in told and "RAY_USE_TLS=1" in told
    assert "RAY_USE_TLS" not in faults(environment={"RAY_USE_TLS": "1"})


def test_on_loopback_there_are_no_others():
    assert faults(environment={}, nodes={"127.0.0.1": SAFE_NODE}) == ""
