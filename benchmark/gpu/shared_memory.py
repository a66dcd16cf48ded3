"""Memory that a lender and a borrower map: who reads what, a lender's death, and the bandwidth.

The lender is a process of its own. The borrower's copies are those of its tier of lent pages, at
the sizes of a published model, beside its copies in host memory.
"""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine

from benchmark.gpu.findings import Findings
from benchmark.gpu.measuring import median_ms, synchronize
from benchmark.gpu.places import platform_of
from sglang_live.extensions.lending.engine.peer_pool import PeerPool
from sglang_live.extensions.lending.engine.shared_memory import SharedMemory, create, map_shared
from sglang_live.extensions.lending.layout import Geometry, units_of

GB = 1e9
_MARK = 0x5A
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """KV of Qwen3-Omni-30B-A3B's thinker in bf16: 96 KiB per token.

    moved_tokens: tokens per transfer; a window of 2048 tokens is 200 MB.
    """

    layers: int = 48
    kv_heads: int = 4
    head_dim: int = 128
    moved_tokens: int = 2048
    repeats: int = 5

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            dtype="bfloat16",
            layout="nhd",
            n_layers=self.layers,
            n_heads=self.kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            page_size=1,
        )


TINY = Options(layers=2, kv_heads=1, head_dim=32, moved_tokens=16, repeats=1)


class Lender:
    """A process that creates memory, passes it on, and writes what it is told to."""

    def __init__(self, n_bytes: int, device: str):
        self._n_bytes = n_bytes
        self._end, other = socket.socketpair()
        self._end.settimeout(_TIMEOUT_S)
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno()), str(n_bytes), device]
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()])

    def shares(self) -> int:
        """The file of its memory."""
        _, fds, _, _ = socket.recv_fds(self._end, 1, 1)
        return fds[0]

    def fills(self, value: int) -> None:
        self._end.send(bytes([1, value]))
        self._end.recv(1)

    def sees(self) -> tuple[int, int]:
        """The first and the last byte of its memory."""
        self._end.send(bytes([2, 0]))
        first, last = self._end.recv(2)
        return first, last

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._end.close()


def lend(fd: int, n_bytes: int, device: str) -> None:
    """The lender's process."""
    with socket.socket(fileno=fd) as end:
        place = torch.device(device)
        memory = create(n_bytes, place)
        socket.send_fds(end, [b"m"], [memory.fd])
        while order := end.recv(2):
            what, value = order
            if what == 1:
                memory.raw.fill_(value)
                synchronize(place)
                end.send(b"d")
            else:
                end.send(bytes([int(memory.raw[0]), int(memory.raw[-1])]))


def run(options: Options, device: str, seed: int) -> Findings:
    platform = platform_of(device)
    place = torch.device(device)
    torch.zeros(1, device=place)  # opens the device, and its files
    geometry = options.geometry
    step_bytes = units_of(geometry.envelope_bytes) * 64
    n_bytes = step_bytes * 2 * options.moved_tokens
    problems: list[str] = []
    with closing(Lender(n_bytes, device)) as lender:
        before = _open_files()
        memory = map_shared(lender.shares(), n_bytes, place)
        problems += _exchange(lender, memory, place)
        lender.kill()
        rows = _copies(options, memory, place, seed, problems)
        memory.close()
        if left := _open_files() - before:
            problems.append(f"files stay open: {left}")
    figures = {"platform": platform, "n_bytes": n_bytes, "copies": rows}
    lines = [f"{row['tier']:6} {row['direction']:9} {row['gb_per_s']:8.2f} GB/s" for row in rows]
    return Findings(figures, tuple(problems), tuple(lines))


def _open_files() -> set[str]:
    gc.collect()
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of iterdir() itself
            found.add(f"{link.name} {os.readlink(link)}")
    return found


def _exchange(lender: Lender, memory: SharedMemory, place: torch.device) -> list[str]:
    problems = []
    if memory.raw.any():
        problems.append("new memory is not zero")
    lender.fills(_MARK)
    if not bool((memory.raw == _MARK).all()):
        problems.append("the borrower does not read what the lender has written")
    memory.raw[0] = memory.raw[-1] = 7
    synchronize(place)
    if lender.sees() != (7, 7):
        problems.append("the lender does not read what the borrower has written")
    lender.kill()
    if not bool((memory.raw[1:-1] == _MARK).all()):
        problems.append("memory of a lender that was killed is not whole")
    return problems


def _copies(
    options: Options, memory: SharedMemory, place: torch.device, seed: int, problems: list[str]
) -> list[dict[str, Any]]:
    """Bandwidth from and to the device's pool, of tokens at random places."""
    geometry, n = options.geometry, options.moved_tokens
    pool = _DevicePool(options, place, seed)
    peer = PeerPool(memory.raw, geometry, pool)
    order = torch.Generator().manual_seed(seed)
    step = units_of(geometry.envelope_bytes)
    lent = step * torch.randperm(2 * n, generator=order)[:n]
    slots = torch.randperm(2 * n, generator=order)[:n]
    engine = L2TransferEngine("direct")
    transfer = L2Transfer(peer, pool, lent, slots)

    def save() -> None:
        engine.submit_device_to_host([transfer])

    def load() -> None:
        engine.submit_host_to_device([transfer], transfer_layer_id_max=options.layers)

    rows = []
    for direction, move in (("to_peer", save), ("to_device", load)):
        ms = median_ms(move, place, options.repeats)
        gb_per_s = n * geometry.envelope_bytes / GB / (ms / 1e3)
        rows.append({"tier": "peer", "direction": direction, "ms": ms, "gb_per_s": gb_per_s})
    before = [buffer[slots.to(place)].clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    save()
    synchronize(place)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.zero_()
    load()
    synchronize(place)
    after = [buffer[slots.to(place)] for buffer in (*pool.k_buffer, *pool.v_buffer)]
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        problems.append("tokens differ after a copy to lent pages and back")
    return rows


class _DevicePool:
    """KV buffers as SGLang's pool of plain attention has them."""

    store_dtype = torch.bfloat16

    def __init__(self, options: Options, device: torch.device, seed: int):
        order = torch.Generator().manual_seed(seed)
        shape = (2 * options.moved_tokens, options.kv_heads, options.head_dim)

        def buffers() -> list[torch.Tensor]:
            made = [torch.empty(shape, dtype=self.store_dtype) for _ in range(options.layers)]
            return [one.normal_(generator=order).to(device) for one in made]

        self.k_buffer, self.v_buffer = buffers(), buffers()


if __name__ == "__main__":
    lend(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
