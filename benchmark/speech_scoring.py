"""Cost of scoring a window of speech: the network as published, and as the server runs it.

    python -m benchmark.speech_scoring --json out.json

The published graph takes one user's windows per run, the server's takes those of all users. Each
user has the windows that a decision needs at once. Arms alternate within one run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from benchmark.load.provenance import facts
from sglang_live.interaction.silero import (
    CONTEXT_SAMPLES,
    WINDOW_SAMPLES,
    SileroModel,
    bundled_model_path,
)

USERS = (1, 2, 4, 8, 16, 32)
WINDOWS_EACH = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Medians per window."""

    users: int
    published_us: float
    server_us: float


def measure(n_users: int, rounds: int) -> Row:
    rng = np.random.default_rng(1)
    shape = n_users, WINDOWS_EACH, CONTEXT_SAMPLES + WINDOW_SAMPLES
    windows = rng.normal(0, 0.1, shape).astype(np.float32)
    model, published = SileroModel(), _published()
    asked = [(own, model.initial_state()) for own in windows]
    zeros = np.zeros((1, 1, 128), np.float32)

    def one_by_one() -> None:
        for own in windows:
            published.run(None, {"input": own, "h": zeros, "c": zeros})

    arms = one_by_one, lambda: model.score(asked)
    times_s = [[_time_s(arm) for arm in arms] for _ in range(rounds)]
    n_windows = n_users * WINDOWS_EACH
    medians = (1e6 * statistics.median(own) / n_windows for own in zip(*times_s, strict=True))
    return Row(n_users, *(round(us, 1) for us in medians))


def _published() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # the model has unused weights, which are logged
    return onnxruntime.InferenceSession(
        bundled_model_path(), options, providers=["CPUExecutionProvider"]
    )


def _time_s(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    rows = [measure(n, args.rounds) for n in USERS]
    print("  users  published us/window  server us/window")
    for row in rows:
        print(f"{row.users:7d}  {row.published_us:19.1f}  {row.server_us:16.1f}")
    if args.json:
        document = {
            "benchmark": "speech_scoring",
            **facts(),
            "config": {"windows_each": WINDOWS_EACH, "rounds": args.rounds},
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
