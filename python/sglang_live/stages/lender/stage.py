"""A process that lends memory and has no engine: all of it, to one engine at a time.

In: the broker's introductions, the borrower's answers. Out: leases of equal size in the table.
The memory is of the host, or of a GPU on which no stage runs.

It needs its memory for nothing else, so it recalls no lease. When it ends, the borrower's mapping
keeps the memory until the copies in it have moved to the host, as with an engine that ends.
"""

import asyncio
import os
import time
from collections.abc import Iterator

import torch

from sglang_live.bridge.memory.shared_memory import create
from sglang_live.bridge.platform import cpu
from sglang_live.engine_channel.lease_channel import RECONNECT_S
from sglang_live.engine_channel.lease_table import N_ROWS
from sglang_live.engine_channel.lender_link import LenderLink
from sglang_live.errors import StageFailedError
from sglang_live.kv.peer_layout import Memory
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.transport.lease_broker import lease_socket
from sglang_live.stages.transport.server import ServedJob

# A lease is some of these. A borrower's token is some hundred KiB, and lies within one lease.
BLOCK_BYTES = 1 << 20
_LEASE_BLOCKS = 64


class LentMemory:
    """
    Args:
        n_bytes: at least one block; a rest is not lent.
        path: of the broker's socket.
        device: that has the memory.
    """

    def __init__(self, name: str, n_bytes: int, path: str, device: torch.device):
        self._n_blocks = n_bytes // BLOCK_BYTES
        self._lease_blocks = max(_LEASE_BLOCKS, -(-self._n_blocks // N_ROWS))
        size = self._n_blocks * BLOCK_BYTES
        self._shared = create(size, device)
        memory = Memory(kind=device.type, offsets=(0,), row_bytes=(BLOCK_BYTES,), n_bytes=size)
        self.link = LenderLink(name, self._shared.fd, memory, path)
        self._rows: list[int] = []
        self._n_lost = 0

    def step(self) -> None:
        """To be called when the bell rings, and now and then."""
        self.link.receive(time.monotonic())
        if self.link.partner is None:
            return
        if self.link.partner.has_ended:
            self._shared.clear()  # of the borrower's bytes, which no process maps any more
            self._rows = []
            self._n_lost += 1
            self.link.part()
        elif not self._rows:
            rows = (self.link.table.offer(first, n) for first, n in self._runs())
            self._rows = [row for row in rows if row is not None]
            self.link.partner.bell.ring()

    def close(self) -> None:
        self.link.close()
        self._shared.close()

    def _runs(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self._n_blocks, self._lease_blocks):
            yield first, min(self._lease_blocks, self._n_blocks - first)

    def load(self) -> dict[str, float]:
        active = [row for row in self._rows if self.link.table.is_active(row)]
        return {
            "leases_state_offered": float(len(self._rows) - len(active)),
            "leases_state_active": float(len(active)),
            "lent_bytes": float(self._n_blocks * BLOCK_BYTES) if self._rows else 0.0,
            "lent_bytes_resident": float(self._shared.resident_bytes),
            "borrowers_lost": float(self._n_lost),
        }


class LenderStage:
    """
    Args:
        spec: engine_args has n_bytes.
    """

    def __init__(self, spec: StageSpec):
        device = torch.device("cpu" if cpu.is_active() else spec.device)
        name = f"{spec.stage}-{os.getpid()}"
        path = str(lease_socket(spec.run_dir))
        self._memory = LentMemory(name, spec.engine_args["n_bytes"], path, device)
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._memory.link.bell.fd, self._memory.step)
        self._stepping = asyncio.create_task(self._step())

    async def _step(self) -> None:
        """The broker's messages and a borrower's end ring no bell."""
        while True:
            self._memory.step()
            await asyncio.sleep(RECONNECT_S)

    async def run(self, job: ServedJob) -> None:
        raise StageFailedError("a lender has no jobs")

    async def close_session(self, session_id: str) -> None:
        return

    def load(self) -> dict[str, float]:
        return self._memory.load()
