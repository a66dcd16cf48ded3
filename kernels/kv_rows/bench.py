"""How many programs fill the link to the host, against one copy of the same bytes.

    python -m sglang_live.kernels.kv_rows.bench --json out.json

Run it in a checkout. Keys and values of a whole window at random slots of all layers, in both
directions; the arms alternate. On a CPU every arm but one copy is the
reference.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from benchmark.gpu.measuring import N_WARM_UP, synchronize
from benchmark.load.provenance import facts
from sglang_live.kernels.kv_rows import kernel

PROGRAMS = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """KV of Qwen3-Omni's thinker in bf16, and what to run; one flag per field."""

    rows: int = 2048
    layers: int = 48
    heads: int = 4
    head_dim: int = 128
    slots: int = 8192
    repeats: int = 10
    seed: int = 1
    device: str = "cuda"
    json: str = ""


def parse_options() -> Options:
    parser = argparse.ArgumentParser(prog="kv_rows.bench", description=__doc__)
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=field.type, default=field.default)
    return Options(**vars(parser.parse_args()))


def arms(o: Options) -> dict[str, Callable[[], object]]:
    """The operations under comparison, by direction and name."""
    device = torch.device(o.device)
    pin = device.type == "cuda"
    shape = (2 * o.layers, o.slots, o.heads, o.head_dim)
    sides = {
        "to_host": torch.zeros(shape, dtype=torch.bfloat16, pin_memory=pin),
        "to_device": torch.zeros(shape, dtype=torch.bfloat16, device=device),
    }
    order = torch.Generator().manual_seed(o.seed)
    slots = [torch.randperm(o.slots, generator=order)[: o.rows] for _ in range(2)]
    rows = torch.stack(slots).to(device)
    found = {}
    for direction, other in (("to_host", "to_device"), ("to_device", "to_host")):
        dst, src = sides[direction], sides[other]
        n = 2 * o.layers * o.rows * o.heads * o.head_dim
        found[f"{direction} one copy"] = _one_copy(src, dst, n)
        for n_programs in PROGRAMS:
            found[f"{direction} {n_programs}"] = _by_kernel(src, dst, rows, n_programs)
    return found


def _one_copy(src: Tensor, dst: Tensor, n: int) -> Callable[[], object]:
    source, target = src.flatten()[:n], dst.flatten()[:n]
    return lambda: target.copy_(source, non_blocking=True)


def _by_kernel(src: Tensor, dst: Tensor, rows: Tensor, n_programs: int) -> Callable[[], object]:
    src_layers, dst_layers = list(src), list(dst)
    return lambda: kernel.copy_rows(src_layers, dst_layers, rows, n_programs=n_programs)


def measure(o: Options) -> dict[str, list[float]]:
    """Milliseconds of every repeat, by arm."""
    calls, device = arms(o), torch.device(o.device)
    times_ms: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(N_WARM_UP + o.repeats):
        for name, call in calls.items():
            synchronize(device)
            begin_s = time.perf_counter()
            call()
            synchronize(device)
            if i >= N_WARM_UP:  # the first calls compile and allocate
                times_ms[name].append((time.perf_counter() - begin_s) * 1e3)
    return times_ms


def main() -> None:
    options = parse_options()
    times_ms = measure(options)
    n_bytes = 4 * options.rows * options.layers * options.heads * options.head_dim
    rates = {name: n_bytes / 1e6 / statistics.median(ms) for name, ms in times_ms.items()}
    for name, gb_per_s in rates.items():
        share = gb_per_s / rates[f"{name.split()[0]} one copy"]
        print(f"{name:20}  {gb_per_s:7.2f} GB/s  {share:6.0%} of one copy")
    if options.json:
        document = {
            "benchmark": "kv_rows",
            **facts(),
            "options": asdict(options),
            "gb_per_s": rates,
            "times_ms": times_ms,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
