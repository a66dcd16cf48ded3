"""Calls of a model that hears while it speaks, on a modelled device: misses by number of calls.

    python -m benchmark.duplex --json out.json

Every call sends a frame each 80 ms. A frame waits for a tick of the metronome
(orchestrator/metronome.py), and then for the device; all that wait are encoded, stepped and decoded
together. A frame misses if its sound is not there 80 ms after it came. Modelled are costs of
batches and the memory of KV; Python, sockets and losses of the network are not.
"""

import argparse
import json
import math
import random
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmark.load.provenance import facts
from sglang_live.extensions.planner.device_model.costs import TalkerCosts, VocoderCosts
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.metronome import TICK_S

MODEL = Path(__file__).with_name("device_models") / "h100_moshi.toml"
FRAME_S = 0.08
# Of a call behind its prompt: all that the model's context holds, or a minute.
WINDOWS = {"context": 2936, "minute": 750}
CALLS = (1, 8, 16, 24, 32, 35, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192)
_SLACK = 64
# Late arrival of a frame: exponential, with this mean.
_JITTER_S = 0.005
_SHARE_OF_MISSES = 0.01


@dataclass(frozen=True, slots=True)
class Costs:
    talker: TalkerCosts
    vocoder: VocoderCosts
    encoder: VocoderCosts
    kv_gb: float

    @staticmethod
    def load(path: Path) -> "Costs":
        document = tomllib.loads(path.read_text("utf-8"))

        def values(section: dict) -> dict[str, float]:
            return {name: figure["value"] for name, figure in section.items()}

        memory, weights, spare = (
            document[name]["value"] for name in ("memory_gb", "weights_gb", "spare_gb")
        )
        return Costs(
            TalkerCosts(**values(document["talker"])),
            VocoderCosts(**values(document["vocoder"])),
            VocoderCosts(**values(document["encoder"])),
            memory - weights - spare,
        )

    def tick_s(self, n: int, kv_tokens: int) -> float:
        """Of n frames that start together."""
        work = self.encoder.decode_s(n) + self.vocoder.decode_s(n)
        return work + self.talker.decode_s(n, kv_tokens)

    def most_calls(self, window: int) -> int:
        """For which there is memory: admission reserves all that a call can need."""
        bound = RetentionConfig(window_tokens=window, slack_tokens=_SLACK).most_frames(1)
        return int(self.kv_gb * 1e9 / (bound * self.talker.kv_token_bytes))


@dataclass(frozen=True, slots=True)
class Row:
    window: str
    n_calls: int
    fits: bool
    p50_ms: float
    p99_ms: float
    missed: float


def simulate(costs: Costs, window: str, n: int, seconds: float, seed: int) -> Row:
    """All calls have as much KV as they ever have."""
    rng = random.Random(seed)
    kv = WINDOWS[window] + _SLACK
    came = []
    for _ in range(n):
        phase_s = rng.random() * FRAME_S
        came += [
            phase_s + k * FRAME_S + rng.expovariate(1 / _JITTER_S)
            for k in range(int(seconds / FRAME_S))
        ]
    came.sort()
    latencies, free_s, at = [], 0.0, 0
    while at < len(came):
        begin_s = max(free_s, _tick_behind(came[at]))
        end = at
        while end < len(came) and _tick_behind(came[end]) <= begin_s:
            end += 1
        free_s = begin_s + costs.tick_s(end - at, (end - at) * kv)
        latencies += [free_s - came_s for came_s in came[at:end]]
        at = end
    waits = np.array(latencies)
    p50, p99 = np.percentile(1000 * waits, (50, 99))
    missed = float((waits > FRAME_S).mean())
    fits = n <= costs.most_calls(WINDOWS[window])
    return Row(window, n, fits, round(float(p50), 1), round(float(p99), 1), round(missed, 4))


def _tick_behind(came_s: float) -> float:
    return math.ceil(came_s / TICK_S) * TICK_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    costs = Costs.load(MODEL)
    rows = [
        simulate(costs, window, n, args.seconds, args.seed) for window in WINDOWS for n in CALLS
    ]
    for row in rows:
        memory = "" if row.fits else ", more than memory holds"
        print(
            f"{row.window:8} {row.n_calls:4} calls: P50 {row.p50_ms:7.1f} ms, "
            f"P99 {row.p99_ms:8.1f}, missed {100 * row.missed:6.2f} %{memory}"
        )
    for window, most in WINDOWS.items():
        served = [
            r.n_calls
            for r in rows
            if r.window == window and r.fits and r.missed <= _SHARE_OF_MISSES
        ]
        print(f"{window}: memory for {costs.most_calls(most)} calls, in time {max(served)}")
    if args.json:
        document = {**facts(), "seed": args.seed, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
