"""Calls of a model that hears while it speaks, on a modelled device: misses by number of calls.

    python -m benchmark.duplex --json out.json

How it is simulated: sglang_live/extensions/planner/calls.py.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmark.load.provenance import facts
from sglang_live.extensions.planner.calls import (
    SHARE_OF_MISSES,
    WINDOWS,
    most_calls,
    simulate,
)
from sglang_live.extensions.planner.device_model.model import load_speech_model

MODEL = Path(__file__).with_name("device_models") / "h100_moshi.toml"
CALLS = (1, 8, 16, 24, 32, 35, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load_speech_model(MODEL)
    rows = [
        simulate(model, window, n, args.seconds, args.seed, model.memory_gb)
        for window in WINDOWS
        for n in CALLS
    ]
    for row in rows:
        memory = "" if row.fits else ", more than memory holds"
        print(
            f"{row.window:8} {row.n_calls:4} calls: P50 {row.p50_ms:7.1f} ms, "
            f"P99 {row.p99_ms:8.1f}, missed {100 * row.missed:6.2f} %{memory}"
        )
    for window, most in WINDOWS.items():
        served = [
            r.n_calls for r in rows if r.window == window and r.fits and r.missed <= SHARE_OF_MISSES
        ]
        in_memory = most_calls(model, most, model.memory_gb)
        print(f"{window}: memory for {in_memory} calls, in time {max(served)}")
    if args.json:
        document = {**facts(), "seed": args.seed, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
