"""Smart Turn: the probability, from the voice alone, that the user has finished a turn.

In: the last seconds of a turn, up to a pause. Out: a probability.
Owner: one SmartTurnModel per process, stateless, shared by all sessions.
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from sglang_live.core import INPUT_RATE_HZ

# Input of the model: the last eight seconds, with silence before shorter audio.
MODEL_SAMPLES = 8 * INPUT_RATE_HZ

_FFT, _HOP, _N_MELS = 400, 160, 80
_FLOOR, _RANGE = 1e-10, 8.0


class EndpointModel(Protocol):
    def completeness(self, pcm: np.ndarray) -> float:
        """
        Args:
            pcm: [n] int16 at INPUT_RATE_HZ, from the turn's beginning to a pause.
        Returns:
            0 to 1, after some tens of ms. May be called from any thread.
        """
        ...


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
    return cpu.is_file() and "vnni" in cpu.read_text()


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
    mel = np.log10(np.maximum(_mel_filters() @ power.T, _FLOOR))
    features: np.ndarray = (np.maximum(mel, mel.max() - _RANGE) + 4) / 4
    return features


@cache
def _mel_filters() -> np.ndarray:
    """[80, 201] float32: Slaney's triangles of equal area, 0 to 8 kHz."""
    edges = _slaney_hz(np.linspace(0, _slaney_mel(INPUT_RATE_HZ / 2), _N_MELS + 2))
    hz = np.linspace(0, INPUT_RATE_HZ / 2, _FFT // 2 + 1)
    below, centre, above = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    slopes = np.minimum((hz - below) / (centre - below), (above - hz) / (above - centre))
    filters: np.ndarray = (np.maximum(slopes, 0) * 2 / (above - below)).astype(np.float32)
    return filters


# Slaney's scale: linear up to 1 kHz, logarithmic above.
_LINEAR_HZ, _KNEE_HZ, _KNEE_MEL, _STEP = 200 / 3, 1000.0, 15.0, float(np.log(6.4)) / 27


def _slaney_mel(hz: float) -> float:
    if hz < _KNEE_HZ:
        return hz / _LINEAR_HZ
    return _KNEE_MEL + float(np.log(hz / _KNEE_HZ)) / _STEP


def _slaney_hz(mel: np.ndarray) -> np.ndarray:
    above = _KNEE_HZ * np.exp(_STEP * (mel - _KNEE_MEL))
    return np.where(mel < _KNEE_MEL, mel * _LINEAR_HZ, above)
