"""Cost of telling voices apart: CPU of one comparison, memory, and many sessions at once."""

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from prometheus_client import CollectorRegistry

from sglang_live.clock import MonotonicClock
from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.filters.other_voices import OtherVoices, SpeakerThread
from sglang_live.interaction.filters.voiceprint import AGAIN, LENGTHS, SpeakerModel, parts_of
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.vad import TurnDetection, VadSettings
from sglang_live.models.resemblyzer import SpeakerEncoder
from sglang_live.telemetry.metrics import GatewayMetrics

_TIMES = 20
_TURN_S = 4.0
# Windows in a packet, as the detector scores them.
_WINDOWS = 4
_VOICE_S = 10.0
_MIB = 1 << 20


def cost(directory: Path) -> dict:
    """CPU time in one thread; memory that the loaded network takes after its first runs."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    model = SpeakerEncoder.load(directory)
    voice = noise(_TURN_S)
    parts, lengths = parts_of(voice)
    batches = [parts[at : at + 5] for at in range(0, len(parts), 5)]
    turn_ms = _cpu_ms(lambda: [model.embed(batch, lengths) for batch in batches])
    memory = psutil.Process().memory_info().rss - before
    compared = [
        (
            n * WINDOW_SAMPLES / INPUT_RATE_HZ,
            _cpu_ms(lambda n=n: model.embed([voice[: n * WINDOW_SAMPLES]])),
        )
        for n in LENGTHS
    ]
    # A voice that goes on is compared by its longest audio.
    second_ms = compared[-1][1] * INPUT_RATE_HZ / (AGAIN * WINDOW_SAMPLES)
    return {
        "comparison_ms": compared,
        "turn_ms": turn_ms,
        "second_ms": second_ms,
        "memory_mib": memory / _MIB,
    }


def noise(seconds: float) -> np.ndarray:
    rng = np.random.default_rng(5)
    return rng.normal(0, 3000, round(seconds * INPUT_RATE_HZ)).astype(np.int16)


def _cpu_ms(run: Callable[[], object]) -> float:
    run()
    began_s = time.thread_time()
    for _ in range(_TIMES):
        run()
    return 1000 * (time.thread_time() - began_s) / _TIMES


class _Far:
    """The model's time, and the direction of another person: the costliest of voices."""

    def __init__(self, model: SpeakerModel) -> None:
        self._model, self.is_other = model, False

    def embed(self, sounds, lengths=()) -> np.ndarray:
        found = self._model.embed(sounds, lengths)
        return np.zeros_like(found) if self.is_other else found


def served(model: SpeakerModel, n_sessions: int) -> dict:
    """Sessions over each of which another person speaks at the same time, in real time."""
    return asyncio.run(_served(_Far(model), n_sessions))


async def _served(model: _Far, n_sessions: int) -> dict:
    clock, metrics = MonotonicClock(), GatewayMetrics(CollectorRegistry())
    thread = SpeakerThread(model)
    sessions = [OtherVoices(thread, clock, metrics) for _ in range(n_sessions)]
    for session in sessions:
        session.configure(TurnDetection(vad=VadSettings(), ignore_other_voices=True))
        session.learn(noise(_TURN_S))
        while not session.known.is_known:
            await asyncio.sleep(0.01)
    model.is_other = True
    rng = np.random.default_rng(n_sessions)
    waits_s = await asyncio.gather(*(_speak(each, rng.uniform(0, 1)) for each in sessions))
    thread.close()
    waited_ms = 1000 * np.concatenate(waits_s)
    late = metrics.registry.get_sample_value(
        "sglang_live_gateway_voice_comparisons_total", {"outcome": "late"}
    )
    return {
        "sessions": n_sessions,
        "comparisons": len(waited_ms),
        "late": int(late or 0),
        "p50_ms": float(np.percentile(waited_ms, 50)),
        "p95_ms": float(np.percentile(waited_ms, 95)),
    }


async def _speak(session: OtherVoices, begin_s: float) -> list[float]:
    """Times of the packets that waited for a comparison."""
    await asyncio.sleep(begin_s)
    voice, size = noise(_VOICE_S), _WINDOWS * WINDOW_SAMPLES
    began_s, waits_s = time.monotonic(), []
    for at in range(0, len(voice) - size + 1, size):
        due_s = began_s + (at + size) / INPUT_RATE_HZ
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        asked_s = time.monotonic()
        await session.hear(voice[at : at + size], np.full(_WINDOWS, True))
        waited_s = time.monotonic() - asked_s
        if waited_s > 1e-3:
            waits_s.append(waited_s)
    return waits_s
