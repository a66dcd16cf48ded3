"""Smart Turn: the probability, from the voice alone, that the user has finished a turn.

In: the last seconds of a turn, up to a pause. Out: a probability.
Owner: one SmartTurnModel and one EndpointThreads per process, stateless, shared by all sessions.
"""

import asyncio
import importlib.util
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.sound.mel import slaney_filters

# Input of the model: the last eight seconds, with silence before shorter audio.
MODEL_SAMPLES = 8 * INPUT_RATE_HZ

_FFT, _HOP, _N_MELS = 400, 160, 80
_FLOOR, _RANGE = 1e-10, 8.0
# A pause costs the network as much in a batch with others as alone, so that pauses are scored side
# by side. More threads would take the cores of the stages.
_MAX_THREADS = 4
# Niceness of these threads above that of the process. Where cores are short, a late verdict costs
# its own turn some silence; an event loop that waits for a core costs every session sound.
_NICER_BY = 10


class EndpointModel(Protocol):
    def completeness(self, pcm: np.ndarray) -> float:
        """
        Args:
            pcm: [n] int16 at INPUT_RATE_HZ, from the turn's beginning to a pause.
        Returns:
            0 to 1, after some tens of ms. May be called from any thread.
        """
        ...


def _threads() -> Executor:
    n = min(os.cpu_count() or 1, _MAX_THREADS)
    return ThreadPoolExecutor(n, thread_name_prefix="endpoint", initializer=_stand_back)


def _stand_back() -> None:
    thread = threading.get_native_id()  # Linux has a niceness for each thread
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICER_BY
    os.setpriority(os.PRIO_PROCESS, thread, niceness)


@dataclass(eq=False)
class EndpointThreads:
    """An endpoint model beside the event loop."""

    model: EndpointModel
    threads: Executor = field(default_factory=_threads)

    async def score(self, pcm: np.ndarray, is_due: Callable[[], bool]) -> float | None:
        """As EndpointModel.completeness.

        is_due: asked in a thread when its turn comes. If not, the score is None.
        """

        def completeness() -> float | None:
            return self.model.completeness(pcm) if is_due() else None

        return await asyncio.get_running_loop().run_in_executor(self.threads, completeness)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


class SmartTurnModel:
    """Pipecat's Smart Turn v3 through onnxruntime on one thread.

    A Whisper encoder with a classifier, trained on ends of turns and pauses in 23 languages.
    BSD-2-Clause; github.com/pipecat-ai/smart-turn.
    """

    def __init__(self, model_path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        if not _has_vnni():
            # The weights are int8. Without it sums overflow on such x86 processors, and finished
            # sentences sound unfinished (onnxruntime, kOrtSessionOptionsAvx2PrecisionMode). With
            # VNNI the scores are the same and would take half as long again.
            options.add_session_config_entry("session.x64quantprecision", "1")
        self._session = onnxruntime.InferenceSession(
            str(model_path), options, providers=["CPUExecutionProvider"]
        )

    def completeness(self, pcm: np.ndarray) -> float:
        features = log_mel(pcm[-MODEL_SAMPLES:])
        [out] = self._session.run(None, {"input_features": features[None]})
        return float(np.asarray(out).reshape(-1)[0])


def _has_vnni() -> bool:
    """Whether the processor sums products of bytes in 32 bits. False if that is not known."""
    cpu = Path("/proc/cpuinfo")
    return cpu.is_file() and "vnni" in cpu.read_text("utf-8")


def installed_model_path() -> Path | None:
    """Find the network in the pipecat-ai package, which is not imported; None if not installed."""
    spec = importlib.util.find_spec("pipecat")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "audio" / "turn" / "smart_turn" / "data"
    return max(folder.glob("smart-turn-v3*cpu.onnx"), default=None)


def log_mel(pcm: np.ndarray) -> np.ndarray:
    """Compute Whisper's features of the last eight seconds: [80, 800] float32.

    The samples are normalised to mean 0 and variance 1 first, as in the model's training.
    """
    wave = np.zeros(MODEL_SAMPLES, np.float32)
    if len(pcm):
        wave[-len(pcm) :] = pcm.astype(np.float32) / 32768
    wave = (wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)
    padded = np.pad(wave, _FFT // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::_HOP][:-1]
    window = np.hanning(_FFT + 1)[:-1].astype(np.float32)
    spectrum = np.fft.rfft(frames * window)  # complex64, as the samples are float32
    power = spectrum.real**2 + spectrum.imag**2
    mel = np.log10(np.maximum(slaney_filters(_N_MELS, _FFT, INPUT_RATE_HZ) @ power.T, _FLOOR))
    features: np.ndarray = (np.maximum(mel, mel.max() - _RANGE) + 4) / 4
    return features
