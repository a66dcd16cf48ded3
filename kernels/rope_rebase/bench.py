"""Cost of a rebase against a copy of the same rows, which compaction could do instead.

    python -m sglang_live.kernels.rope_rebase.bench --json out.json

Run it in a checkout. Keys of a whole window, layer by layer; the arms alternate.
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
from sglang_live.kernels.rope_rebase import rebase_keys, reference

THETA = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Keys of Qwen3-Omni's thinker in bf16, and what to run; one flag per field."""

    rows: int = 2048
    layers: int = 48
    heads: int = 4
    head_dim: int = 128
    slots: int = 65_536
    delta: int = 20_000
    repeats: int = 20
    seed: int = 1
    device: str = "cuda"
    json: str = ""


def parse_options() -> Options:
    parser = argparse.ArgumentParser(prog="rope_rebase.bench", description=__doc__)
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=field.type, default=field.default)
    return Options(**vars(parser.parse_args()))


def arms(o: Options) -> dict[str, Callable[[Tensor], None]]:
    """The operations under comparison, by name; each takes one layer's keys."""
    slots = torch.randperm(o.slots, generator=torch.Generator().manual_seed(o.seed))
    rows, free = slots.to(o.device).split([o.rows, o.slots - o.rows])
    exponent = torch.arange(0, o.head_dim, 2, device=o.device) / o.head_dim
    turn = {"inv_freq": THETA**-exponent, "neox": True, "rotary_dim": o.head_dim}
    return {
        "rebase": lambda keys: rebase_keys(keys, rows, o.delta, **turn),
        "reference": lambda keys: reference.rebase_keys(keys, rows, o.delta, **turn),
        "copy": lambda keys: keys.index_copy_(0, free[: o.rows], keys.index_select(0, rows)),
    }


@torch.inference_mode()
def measure(o: Options) -> dict[str, list[float]]:
    """Milliseconds for all layers, of every repeat, by arm."""
    shape = (o.slots, o.heads, o.head_dim)
    layers = [torch.rand(shape, device=o.device).bfloat16() for _ in range(o.layers)]
    calls = arms(o)
    times_ms = {name: [] for name in calls}
    for i in range(N_WARM_UP + o.repeats):
        for name, call in calls.items():
            synchronize(torch.device(o.device))
            begin_s = time.perf_counter()
            for keys in layers:
                call(keys)
            synchronize(torch.device(o.device))
            if i >= N_WARM_UP:  # the first calls compile and allocate
                times_ms[name].append((time.perf_counter() - begin_s) * 1e3)
    return times_ms


def main() -> None:
    options = parse_options()
    times_ms = measure(options)
    medians_ms = {name: statistics.median(own_ms) for name, own_ms in times_ms.items()}
    for name, ms in medians_ms.items():
        print(f"{name:10}  {ms:8.3f} ms  {ms / medians_ms['copy']:6.2f} x copy")
    if options.json:
        document = {
            "benchmark": "rope_rebase",
            **facts(),
            "options": asdict(options),
            "median_ms": medians_ms,
            "times_ms": times_ms,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
