"""A process that lends memory and has no engine: all of it, to one engine at a time.

An engine of several ranks borrows a memory for each of them from the one process.

In: the broker's introductions, the borrower's answers. Out: leases of equal size in the table.
The memory is of the host, or of a GPU on which no stage runs.

It needs its memory for nothing else, so it recalls no lease. When it ends, the borrower's mapping
keeps the memory until the copies in it have moved to the host, as with an engine that ends.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from sglang_live.aio import vital
from sglang_live.bridge.platform import cpu
from sglang_live.errors import StageFailedError
from sglang_live.extensions.lending.channel import RECONNECT_S, Member, lease_socket
from sglang_live.extensions.lending.engine.shared_memory import create
from sglang_live.extensions.lending.layout import Memory
from sglang_live.extensions.lending.link import LenderLink
from sglang_live.extensions.lending.table import N_ROWS
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.transport.server import ServedJob

# A lease is some of these. A borrower's token is some hundred KiB, and lies within one lease.
BLOCK_BYTES = 1 << 20
_LEASE_BLOCKS = 64


class LentMemory:
    """
    Args:
        n_bytes: at least one block per rank; a rest is not lent.
        path: of the broker's socket.
        device: that has the memory.
        n_ranks: of the engine that borrows; each has an equal part of the memory.

    Attributes:
        links: one per rank.
    """

    def __init__(self, name: str, n_bytes: int, path: str, device: torch.device, n_ranks: int = 1):
        self._n_blocks = n_bytes // n_ranks // BLOCK_BYTES
        self._lease_blocks = max(_LEASE_BLOCKS, -(-self._n_blocks // N_ROWS))
        size = self._n_blocks * BLOCK_BYTES
        self._shared = [create(size, device) for _ in range(n_ranks)]
        memory = Memory(kind=device.type, offsets=(0,), row_bytes=(BLOCK_BYTES,), n_bytes=size)
        self.links = [
            LenderLink(Member(name, path, rank, n_ranks), shared.fd, memory)
            for rank, shared in enumerate(self._shared)
        ]
        self._rows: list[int] = []
        self._n_lost = 0

    @property
    def link(self) -> LenderLink:
        """Of rank 0, whose table tells of all ranks."""
        return self.links[0]

    def step(self) -> None:
        """To be called when the bell rings, and now and then."""
        now_s = time.monotonic()
        for link in self.links:
            link.receive(now_s)
        if self.link.can_begin:
            for link in self.links:
                link.begin()
        if self.link.partner is None:
            return
        if self.link.is_lost:
            for shared in self._shared:
                shared.clear()  # of the borrower's bytes, which no process maps any more
            self._rows = []
            self._n_lost += 1
            for link in self.links:
                link.part()
        elif not self._rows:
            for link in self.links:  # each offers the same leases, of its own memory
                rows = (link.table.offer(first, n) for first, n in self._runs())
                self._rows = [row for row in rows if row is not None]
            self.link.partner.bell.ring()

    def close(self) -> None:
        for link, shared in zip(self.links, self._shared, strict=True):
            link.close()
            shared.close()

    def _runs(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self._n_blocks, self._lease_blocks):
            yield first, min(self._lease_blocks, self._n_blocks - first)

    def load(self) -> dict[str, float]:
        active = [row for row in self._rows if self.link.table.is_active(row)]
        n_bytes = len(self._shared) * self._n_blocks * BLOCK_BYTES
        return {
            "leases_state_offered": float(len(self._rows) - len(active)),
            "leases_state_active": float(len(active)),
            "lent_bytes": float(n_bytes) if self._rows else 0.0,
            "lent_bytes_resident": float(sum(shared.resident_bytes for shared in self._shared)),
            "borrowers_lost": float(self._n_lost),
        }


class LenderStage:
    """
    Args:
        spec: engine_args has n_bytes and n_ranks of LentMemory.
    """

    def __init__(self, spec: StageSpec):
        device = torch.device("cpu" if cpu.is_active() else spec.device)
        name = f"{spec.stage}-{os.getpid()}"
        path = str(lease_socket(Path(spec.run_dir)))
        n_bytes, n_ranks = (spec.engine_args[key] for key in ("n_bytes", "n_ranks"))
        self._memory = LentMemory(name, n_bytes, path, device, n_ranks)
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._memory.link.bell.fd, self._memory.step)
        self._stepping = vital(self._step(), "lender")

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
