"""What the checks at full size share: the model, and what of the GPU's memory each engine has.

benchmark/notes/gpu.md has the plan of memory and of time.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.random_model.folder import make

# Few, because each is a recording of all layers; between them a round is padded.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64)
# Of one H200: weights of 63.4 GB and KV of 39.3 GB, and of 6.9 and 2.0 GB.
_POOL_TOKENS = {"thinker": 400_000, "talker": 100_000}


def engine_args(stage: str, device: str, graph_sizes: Sequence[int]) -> dict[str, Any]:
    """As ServerArgs takes them; on a CPU its defaults."""
    if device == "cpu":
        return {}
    return {
        "max_total_tokens": _POOL_TOKENS[stage],
        # Memory is given in tokens; this leaves the rest of the GPU to the other stages.
        "mem_fraction_static": 0.93,
        "max_running_requests": max(graph_sizes),
        "cuda_graph_bs_decode": list(graph_sizes),
        "chunked_prefill_size": 4096,
    }


def server_args(device: str, graph_sizes: Sequence[int]) -> tuple[str, ...]:
    """The same as flags of the server."""
    return tuple(
        f"--{stage}.{name.replace('_', '-')}={_typed(value)}"
        for stage in _POOL_TOKENS
        for name, value in engine_args(stage, device, graph_sizes).items()
    )


def _typed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@contextmanager
def random_model(scale: str) -> Iterator[Path]:
    """A model's folder, of which a server's name of the model is the last part."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / f"random-{scale}"
        make(folder, scale)
        yield folder


def remaining_s(budget_s: float, began_s: float, now_s: float) -> float:
    """Of a check's time; its script may have given it less than its options say."""
    given_s = float(os.environ.get(LIMIT_ENV, budget_s))
    return min(budget_s, given_s) - (now_s - began_s)


# Set by scripts/gpu_check.sh: seconds after which it ends the check.
LIMIT_ENV = "GPU_CHECK_LIMIT_S"
