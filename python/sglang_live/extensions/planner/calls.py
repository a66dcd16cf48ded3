"""Calls of a model that hears while it speaks on a modelled device: how many are served in time.

Every call sends a frame each 80 ms. A frame waits for a tick of the metronome
(orchestrator/metronome.py), and then for the device; all that wait are encoded, stepped and decoded
together. A frame misses if its sound is not there 80 ms after it came. Modelled are costs of
batches and the memory of KV; Python, sockets and losses of the network are not.
"""

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sglang_live.extensions.planner.config import CallsConfig
from sglang_live.extensions.planner.device_model.model import SpeechModel
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.metronome import TICK_S

FRAME_S = 0.08
# Of a call behind its prompt: all that the model's context holds, or a minute.
WINDOWS = {"context": 2936, "minute": 750}
SHARE_OF_MISSES = 0.01
_SLACK = 64
# Late arrival of a frame: exponential, with this mean.
_JITTER_S = 0.005
_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """n_calls at once. fits: there is memory for them. missed: share of their frames."""

    window: str
    n_calls: int
    fits: bool
    p50_ms: float
    p99_ms: float
    missed: float


@dataclass(frozen=True, slots=True)
class Served:
    """Calls that one GPU serves with a window.

    n_calls: with memory, and in time. n_in_memory, n_in_time: each by itself.
    p99_ms: of that many.
    """

    window: str
    n_calls: int
    n_in_memory: int
    n_in_time: int
    p99_ms: float


def tick_s(model: SpeechModel, n: int, kv_tokens: int) -> float:
    """Of n frames that start together."""
    assert model.encoder is not None, "it hears"
    work = model.encoder.decode_s(n) + model.vocoder.decode_s(n)
    return work + model.talker.decode_s(n, kv_tokens)


def most_calls(model: SpeechModel, window: int, memory_gb: float) -> int:
    """For which there is memory: admission reserves all that a call can need."""
    bound = RetentionConfig(window_tokens=window, slack_tokens=_SLACK).most_frames(1)
    return model.kv_tokens(memory_gb) // bound


def simulate(
    model: SpeechModel, window: str, n: int, seconds: float, seed: int, memory_gb: float
) -> Row:
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
        free_s = begin_s + tick_s(model, end - at, (end - at) * kv)
        latencies += [free_s - came_s for came_s in came[at:end]]
        at = end
    waits = np.array(latencies)
    p50, p99 = np.percentile(1000 * waits, (50, 99))
    missed = float((waits > FRAME_S).mean())
    fits = n <= most_calls(model, WINDOWS[window], memory_gb)
    return Row(window, n, fits, round(float(p50), 1), round(float(p99), 1), round(missed, 4))


def _tick_behind(came_s: float) -> float:
    return math.ceil(came_s / TICK_S) * TICK_S


def served(model: SpeechModel, window: str, memory_gb: float, seed: int = 1) -> Served:
    """By simulation of some seconds; with more calls, more frames miss."""

    def row(n: int) -> Row:
        return simulate(model, window, n, _SECONDS, seed, memory_gb)

    least, beyond = 0, 1
    while row(beyond).missed <= SHARE_OF_MISSES:
        least, beyond = beyond, 2 * beyond
    while beyond - least > 1:
        middle = (least + beyond) // 2
        if row(middle).missed <= SHARE_OF_MISSES:
            least = middle
        else:
            beyond = middle
    in_memory = most_calls(model, WINDOWS[window], memory_gb)
    n_calls = min(least, in_memory)
    p99_ms = row(n_calls).p99_ms if n_calls else math.nan
    return Served(window, n_calls, in_memory, least, p99_ms)


# --- the planner's answer ---


def plan_calls(config: CallsConfig) -> list[Served]:
    return [served(config.model, window, config.memory_gb) for window in WINDOWS]


def text(config: CallsConfig, found: list[Served]) -> str:
    lines = [
        f"{config.n_gpus} x {config.gpu.name}: calls at once of a model that hears while it "
        f"speaks (simulated, modelled device: {config.model.name})",
        f"in time: at most {100 * SHARE_OF_MISSES:g} % of the frames take more than "
        f"{1000 * FRAME_S:g} ms to their sound",
        "",
    ]
    for one in found:
        lines.append(
            f"window of {_named(one.window)}: {config.n_gpus * one.n_calls} calls, "
            f"{one.n_calls} per GPU, P99 {one.p99_ms:.0f} ms; memory for {one.n_in_memory}, in "
            f"time up to {one.n_in_time}"
        )
        if config.price is not None and one.n_calls:
            lines.append(f"  cost: {config.price / one.n_calls:.4f} for an hour of one call")
    command = f"python -m sglang_live.launch_server --model-path {config.model_path}"
    return "\n".join([*lines, "", "Start one server for each GPU:", "", command])


def document(config: CallsConfig, found: list[Served]) -> dict[str, Any]:
    return {
        "gpu": config.gpu.name,
        "n_gpus": config.n_gpus,
        "simulated": config.model.facts(),
        "windows": [asdict(one) for one in found],
    }


def _named(window: str) -> str:
    return f"{WINDOWS[window] * FRAME_S:.0f} s"
