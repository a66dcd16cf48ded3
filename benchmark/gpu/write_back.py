"""Bandwidth of SGLang's own transfers between its KV pools, against one large copy.

Sessions are written back and loaded with these: pages at random places of a pool that is laid out
layer by layer, to random places on the host.
"""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.plugins import load_plugins

from benchmark.gpu.findings import Findings
from benchmark.gpu.measuring import median_ms
from benchmark.gpu.places import platform_of

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """KV of Qwen3-Omni-30B-A3B's thinker in bf16: 96 KiB per token.

    moved_tokens: tokens per transfer; a window of 2048 tokens is 200 MB.
    """

    layers: int = 48
    kv_heads: int = 4
    head_dim: int = 128
    page_tokens: tuple[int, ...] = (1, 16, 64)
    moved_tokens: int = 2048
    repeats: int = 5


TINY = Options(layers=2, kv_heads=1, head_dim=4, page_tokens=(1, 4), moved_tokens=16, repeats=1)


def run(options: Options, device: str, seed: int) -> Findings:
    place = torch.device(device)
    platform = platform_of(device)
    if platform != "cuda":
        # Copies without sgl-kernel. On a CPU both tiers are host memory: the cost of finding and
        # copying pages without a link.
        load_plugins()
    rows, problems = [], []
    large = _large(options, place)
    for n_tokens in options.page_tokens:
        opened = Tiers(options, n_tokens, place, seed, with_kernels=platform == "cuda")
        with closing(opened) as tiers:
            for direction, move in (("to_host", tiers.save), ("to_device", tiers.load)):
                ms = median_ms(move, place, options.repeats)
                gb_per_s = tiers.n_bytes / GB / (ms / 1e3)
                row = {"page_tokens": n_tokens, "direction": direction, "gb_per_s": gb_per_s}
                rows.append({**row, "share_of_one_copy": gb_per_s / large[direction]})
            if not tiers.returned_intact():
                problems.append(f"pages of {n_tokens} tokens: bytes differ")
    figures = {"platform": platform, "one_copy_gb_per_s": large, "transfers": rows}
    return Findings(figures, tuple(problems), tuple(_lines(rows)))


class Tiers:
    """SGLang's pools, with room for twice the moved tokens."""

    def __init__(
        self, options: Options, page: int, device: torch.device, seed: int, *, with_kernels: bool
    ):
        from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        self._pool = MHATokenToKVPool(
            size=2 * options.moved_tokens,
            page_size=page,
            dtype=torch.bfloat16,
            head_num=options.kv_heads,
            head_dim=options.head_dim,
            layer_num=options.layers,
            device=str(device),
            enable_memory_saver=False,
        )
        on_gpu = device.type == "cuda"
        self._host = MHATokenToKVPoolHost(
            self._pool.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            page,
            "layer_first",
            pin_memory=on_gpu,
            device_capacity_tokens=self._pool.size,
            start_layer=0,
            end_layer=options.layers,
        )
        order = torch.Generator().manual_seed(seed)
        n_pages = options.moved_tokens // page
        pages = [torch.randperm(2 * n_pages, generator=order) for _ in range(2)]
        # SGLang's page 0 takes the writes of padding.
        self._slots = _slots_of(pages[0][:n_pages] + 1, page)
        on_host = _slots_of(pages[1][:n_pages], page)
        self._layers = options.layers
        self._engine = L2TransferEngine("kernel" if with_kernels else "direct")
        # Kernels read the indices on the device, direct copies on the host.
        indices = [x.to(device) if with_kernels else x for x in (on_host, self._slots)]
        self._transfer = L2Transfer(self._host, self._pool, *indices)
        for buffer in (*self._pool.k_buffer, *self._pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=order))
        self.n_bytes = options.moved_tokens * self._host.size_per_token

    def close(self) -> None:
        """Release the host pool. Memory that is freed while CUDA has it registered cannot be
        registered again when a later pool gets the same addresses."""
        self._host.destroy()

    def save(self) -> None:
        self._engine.submit_device_to_host([self._transfer]).finish_event.synchronize()

    def load(self) -> None:
        completion = self._engine.submit_host_to_device(
            [self._transfer], transfer_layer_id_max=self._layers
        )
        completion.finish_event.synchronize()

    def returned_intact(self) -> bool:
        buffers = (*self._pool.k_buffer, *self._pool.v_buffer)
        before = [buffer[self._slots].clone() for buffer in buffers]
        self.save()
        for buffer in buffers:
            buffer[self._slots] = 0
        self.load()
        return all(
            torch.equal(buffer[self._slots], kept)
            for buffer, kept in zip(buffers, before, strict=True)
        )


def _slots_of(pages: torch.Tensor, page: int) -> torch.Tensor:
    return (pages[:, None] * page + torch.arange(page)).flatten()


def _large(options: Options, device: torch.device) -> dict[str, float]:
    """GB/s of one copy of the same size, by direction."""
    n_bytes = options.moved_tokens * options.layers * options.kv_heads * options.head_dim * 4
    host = torch.ones(n_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pool = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    rates = {}
    for direction, target, source in (("to_host", host, pool), ("to_device", pool, host)):
        ms = median_ms(
            lambda target=target, source=source: target.copy_(source, non_blocking=True),
            device,
            options.repeats,
        )
        rates[direction] = n_bytes / GB / (ms / 1e3)
    return rates


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["direction  page tokens    GB/s  of one copy"]
    for row in rows:
        lines.append(
            f"{row['direction']:9}  {row['page_tokens']:>11}  {row['gb_per_s']:6.2f}  "
            f"{row['share_of_one_copy']:11.0%}"
        )
    return lines
