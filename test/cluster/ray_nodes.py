"""A Ray cluster of fake nodes on this machine, run by the Python that has Ray:

    python ray_nodes.py ZONE...

Node 0 is the head, with room for gateways alone; the others have the zones. In: commands as lines
of JSON on stdin. Out: an answer to each on stdout. It ends, with all that it has started, when
stdin ends.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import ray
from ray.cluster_utils import Cluster

from sglang_live import launch_cluster
from sglang_live.cluster.spec import NAMESPACE, read_spec

_STORE_BYTES = 80 << 20
# Ray finds a dead node after 16 s by default, starts a worker for each core before it has work, and
# gives up processes that take 15 s to start, as they do on a busy machine.
_CONFIG = {
    "agent_register_timeout_ms": 240_000,
    "worker_register_timeout_seconds": 240,
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}


class Nodes:
    def __init__(self, zones: list[str]):
        head = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**head, "_system_config": _CONFIG}
        )
        self._nodes = {}
        for zone in zones:
            self.add(zone)
        self.address = self._cluster.address
        ray.init(address=self.address, namespace=NAMESPACE, log_to_driver=False)
        self._cluster.wait_for_nodes()
        self._manager = None

    def add(self, zone: str) -> None:
        labels = {"zone": zone}
        self._nodes[zone] = self._cluster.add_node(
            num_cpus=3, object_store_memory=_STORE_BYTES, labels=labels
        )

    def facts(self) -> dict:
        return {"address": self.address}

    def apply(self, path: str) -> None:
        spec = read_spec(Path(path))
        self._manager = launch_cluster._manager()
        ray.get(self._manager.apply.remote(msgspec.json.encode(spec)))

    def drain(self, name: str) -> bool:
        return ray.get(self._manager.drain.remote(name))

    def status(self) -> list:
        return [msgspec.to_builtins(one) for one in launch_cluster._status(self._manager)]

    def kill_manager(self) -> None:
        ray.kill(self._manager, no_restart=False)

    def kill_head(self) -> None:
        """Its process with the cluster's state. What else is on that machine stays."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def start_head(self) -> None:
        self._cluster.head_node.start_gcs_server()

    def zone_of(self, pid: int) -> str:
        above = {process.pid for process in psutil.Process(pid).parents()}
        [zone] = [zone for zone in self._nodes if self._raylet(zone).pid in above]
        return zone

    def kill_node(self, zone: str) -> None:
        """As a machine that loses its power."""
        with suppress(psutil.NoSuchProcess):  # Ray has ended it
            self._signal(zone, signal.SIGKILL)
        self._cluster.remove_node(self._nodes.pop(zone), allow_graceful=False)

    def pause_node(self, zone: str) -> None:
        """As a machine that is cut off, or hangs."""
        self._signal(zone, signal.SIGSTOP)

    def resume_node(self, zone: str) -> None:
        self._signal(zone, signal.SIGCONT)

    def stop(self) -> None:
        if self._manager is not None:
            ray.get(self._manager.stop.remote())
        ray.shutdown()
        self._cluster.shutdown()

    def _raylet(self, zone: str) -> psutil.Process:
        [raylet] = self._nodes[zone].all_processes["raylet"]
        return psutil.Process(raylet.process.pid)

    def _signal(self, zone: str, number: signal.Signals) -> None:
        raylet = self._raylet(zone)
        for process in (raylet, *raylet.children(recursive=True)):
            with suppress(ProcessLookupError):  # it ended with the one before
                os.kill(process.pid, number)


def main() -> None:
    began_s = time.monotonic()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Ray prints, too
    nodes = Nodes(sys.argv[1:])
    print(json.dumps({"up_s": time.monotonic() - began_s}), file=answers, flush=True)
    try:
        for line in sys.stdin:
            name, *values = json.loads(line)
            try:
                answer = {"value": getattr(nodes, name)(*values)}
            except Exception as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        nodes.stop()


if __name__ == "__main__":
    main()
