"""What makes a Ray cluster unfit for calls: it would end them with its head, or obey anyone.

Measured with Ray 2.60: without an external store, the death of the head's process ends every node
after a minute, and with the nodes all stages.
"""

import os
from collections.abc import Mapping

import msgspec

RECONNECT_ENV = "RAY_gcs_rpc_server_reconnect_timeout_s"
# Ray's own is 15, which its processes hand down.
NICENESS_ENV = "RAY_worker_niceness"
# Ray's own is 60. A head with its state in a store starts again within minutes.
RECONNECT_LEAST_S = 300.0
_STORE_KEY = b"extra_usage_tag_gcs_storage"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TIMEOUT_S = 60.0


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """
    reconnects: for how long it waits for the head, as its variable says.
    niceness: of the processes that it starts.
    """

    reconnects: str
    niceness: int


class RayFacts(msgspec.Struct, frozen=True, kw_only=True):
    """
    store: where the head keeps its state.
    nodes: by address.
    environment: of this process, which Ray has accepted.
    """

    store: str
    nodes: Mapping[str, NodeFacts]
    environment: Mapping[str, str]

    def faults(self) -> list[str]:
        """What to change before calls may depend on it. Empty: nothing."""
        found = []
        if self.store in ("", "memory"):
            found.append(
                "the head keeps its state in memory: give it a store that outlives it, by "
                "RAY_REDIS_ADDRESS=HOST:PORT where `ray start --head` runs"
            )
        for address, node in self.nodes.items():
            if (limit_s := _seconds(node.reconnects)) < RECONNECT_LEAST_S:
                found.append(
                    f"node {address} ends {limit_s:g} s after the head: start Ray there with "
                    f"{RECONNECT_ENV}={2 * RECONNECT_LEAST_S:g}"
                )
            if node.niceness > 0:
                found.append(
                    f"node {address} lets all other programs go before stages and gateways, at "
                    f"niceness {node.niceness}: start Ray there with {NICENESS_ENV}=0"
                )
        if not set(self.nodes) <= set(_LOOPBACK):
            for name, value, what in (
                ("RAY_AUTH_MODE", "token", "anyone who reaches it may run code"),
                ("RAY_USE_TLS", "1", "its connections are in the clear"),
            ):
                if self.environment.get(name) != value:
                    found.append(f"{what}: start Ray everywhere with {name}={value}")
        return found


def _seconds(limit: str) -> float:
    try:
        return float(limit)
    except ValueError:
        return 60.0  # Ray's own


def ray_facts() -> RayFacts:
    """Of the cluster to which this process is connected. A task runs on every node."""
    import ray
    from ray.experimental import internal_kv
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    store = internal_kv._internal_kv_get(_STORE_KEY, namespace=b"usage_stats") or b""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = [
        ray.remote(_node_facts)
        .options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], False)
        )
        .remote()
        for node in nodes
    ]
    found = ray.get(asked, timeout=_TIMEOUT_S)
    addresses = [node["NodeManagerAddress"] for node in nodes]
    return RayFacts(
        store=store.decode(),
        nodes=dict(zip(addresses, found, strict=True)),
        environment=dict(os.environ),
    )


def _node_facts() -> NodeFacts:
    """Of a worker, which has its node's variables."""
    return NodeFacts(reconnects=os.environ.get(RECONNECT_ENV, ""), niceness=os.nice(0))
