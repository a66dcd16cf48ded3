"""Bandwidth of KV pages between host memory and the device, against one large copy.

The host holds whole pages. The device pool is laid out either the same way ("whole") or as
SGLang's KV pool is, layer by layer, keys apart from values ("by_layer"): there a page is many
pieces, and PyTorch copies it to a staging buffer and scatters it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmark.gpu.findings import Findings
from benchmark.gpu.measuring import median_ms, synchronize

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """KV of Qwen3-Omni-30B-A3B's thinker in bf16: 96 KiB per token.

    moved_bytes: bytes per measurement, rounded to whole pages; far larger than any cache.
    """

    layers: int = 48
    kv_heads: int = 4
    head_dim: int = 128
    element_bytes: int = 2
    page_tokens: tuple[int, ...] = (16, 32, 64, 128, 256)
    moved_bytes: int = 1 << 29
    repeats: int = 5


TINY = Options(layers=2, kv_heads=1, head_dim=4, page_tokens=(2, 4), moved_bytes=1000, repeats=1)


def run(options: Options, device: str, seed: int) -> Findings:
    place = torch.device(device)
    rows, problems = [], []
    for memory in ("pageable", "pinned") if place.type == "cuda" else ("pageable",):
        large = dict(_large(options, memory, place))
        rows += [_row("one copy", None, memory, *item, large) for item in large.items()]
        for n_tokens in options.page_tokens:
            for layout in ("whole", "by_layer"):
                pages = Pages(options, n_tokens, memory, layout, place, seed)
                measured = dict(pages.measure(options.repeats))
                rows += [_row(layout, n_tokens, memory, *item, large) for item in measured.items()]
                if not pages.returned_intact():
                    problems.append(f"{memory} pages of {n_tokens} tokens, {layout}: bytes differ")
    token_bytes = _piece_bytes(options) * 2 * options.layers
    figures = {"kv_bytes_per_token": token_bytes, "copies": rows}
    return Findings(figures, tuple(problems), tuple(_lines(rows)))


class Pages:
    """Pages on the host, and the device pool that they are copied to in random order.

    _host, _back: [n_pages, n_pieces, piece_bytes] uint8, source of loads and target of saves.
    _pool: the same shape, with the strides of `layout`.
    """

    def __init__(
        self,
        options: Options,
        n_tokens: int,
        memory: str,
        layout: str,
        device: torch.device,
        seed: int,
    ):
        n_pieces, piece_bytes = 2 * options.layers, n_tokens * _piece_bytes(options)
        n_pages = max(2, options.moved_bytes // (n_pieces * piece_bytes))
        shape = (n_pages, n_pieces, piece_bytes)
        noise = torch.Generator().manual_seed(seed)
        self._host = _host_bytes(shape, memory)
        self._host.random_(0, 256, generator=noise)
        self._back = _host_bytes(shape, memory)
        if layout == "whole":
            self._pool = torch.empty(shape, dtype=torch.uint8, device=device)
        else:
            by_layer = torch.empty(n_pieces, n_pages, piece_bytes, dtype=torch.uint8, device=device)
            self._pool = by_layer.transpose(0, 1)
        self._slots = torch.randperm(n_pages, generator=noise).tolist()
        self._device = device

    def measure(self, repeats: int) -> Iterator[tuple[str, float]]:
        """Direction and GB/s."""
        for direction, copy in (("to_device", self._load), ("to_host", self._save)):
            ms = median_ms(copy, self._device, repeats)
            yield direction, self._host.numel() / GB / (ms / 1e3)

    def returned_intact(self) -> bool:
        self._back.zero_()
        self._load()
        self._save()
        synchronize(self._device)
        return torch.equal(self._host, self._back)

    def _load(self) -> None:
        for page, slot in zip(self._host, self._slots, strict=True):
            self._pool[slot].copy_(page, non_blocking=True)

    def _save(self) -> None:
        for page, slot in zip(self._back, self._slots, strict=True):
            page.copy_(self._pool[slot], non_blocking=True)


def _large(options: Options, memory: str, device: torch.device) -> Iterator[tuple[str, float]]:
    host = _host_bytes((options.moved_bytes,), memory).fill_(1)
    pool = torch.empty(options.moved_bytes, dtype=torch.uint8, device=device)
    for direction, target, source in (("to_device", pool, host), ("to_host", host, pool)):
        ms = median_ms(
            lambda target=target, source=source: target.copy_(source, non_blocking=True),
            device,
            options.repeats,
        )
        yield direction, options.moved_bytes / GB / (ms / 1e3)


def _host_bytes(shape: tuple[int, ...], memory: str) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=memory == "pinned")


def _piece_bytes(options: Options) -> int:
    """Bytes of the keys, or of the values, of one token in one layer."""
    return options.kv_heads * options.head_dim * options.element_bytes


def _row(
    layout: str,
    page_tokens: int | None,
    memory: str,
    direction: str,
    gb_per_s: float,
    large: dict[str, float],
) -> dict[str, Any]:
    return {
        "layout": layout,
        "page_tokens": page_tokens,
        "host_memory": memory,
        "direction": direction,
        "gb_per_s": gb_per_s,
        "share_of_one_copy": gb_per_s / large[direction],
    }


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["memory    direction  layout    page tokens    GB/s  of one copy"]
    for row in rows:
        lines.append(
            f"{row['host_memory']:8}  {row['direction']:9}  {row['layout']:8}  "
            f"{row['page_tokens'] or '-':>11}  {row['gb_per_s']:6.2f}  "
            f"{row['share_of_one_copy']:11.0%}"
        )
    return lines
