"""GatewayHost, an actor with a gateway in a child process, and the table in a file for it."""

import re
import threading

import msgspec

from sglang_live.cluster.directory import RayDirectory
from sglang_live.cluster.host import ProcessHost
from sglang_live.cluster.hosted import GatewayOrder, HostNews
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.transport.protocol import protocol_hash

# As launch_server prints it.
_SERVING = re.compile(r"serving .* on (\S+)\s*")


class GatewayHost(ProcessHost):
    """
    Args:
        order: a GatewayOrder as JSON.
    """

    _program = "gateway"

    def __init__(self, order: bytes):
        self._given = msgspec.json.decode(order, type=GatewayOrder)
        # Removed after this process by the next one that starts on this machine.
        self._table = RunDir.make().path / "stages.json"
        directory = RayDirectory()
        threading.Thread(target=directory.write_to, args=(self._table,), daemon=True).start()
        super().__init__()

    def _order(self) -> msgspec.Struct:
        return GatewayOrder(argv=[*self._given.argv, "--directory", str(self._table)])

    def _read(self, line: str) -> HostNews | None:
        serving = _SERVING.fullmatch(line)
        return HostNews(protocol=protocol_hash(), url=serving[1]) if serving else None
