"""Resemblyzer's speaker encoder through onnxruntime: three LSTM layers over a mel spectrogram.

In: speech, int16 at 16 kHz. Out: embeddings of length 1; two of one voice point in similar
directions. The weights are those of the package Resemblyzer (packages/pins.py), whose code is not
used. Source: generalized end-to-end loss for speaker verification, arXiv:1710.10467.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.models.onnx_graph import Graph, ints
from sglang_live.models.resemblyzer.checkpoint import Floats, read_weights
from sglang_live.models.speech import Pcm
from sglang_live.sound.mel import slaney_filters

FILE = "resemblyzer/pretrained.pt"
EMBEDDING = 256  # also the width of the layers

_FFT, _HOP, _N_MELS, _N_LAYERS = 400, 160, 40, 3
# The spectrogram is of power, not logarithmic, so the network hears the level. Its authors raise
# soft recordings to -30 dB of full scale and leave loud ones; here each sound gets the level that
# most of those have, so that a user may speak softly or move.
_LEVEL_DB = -25.0
_LEAST_RMS = 1e-5
_HANN = np.hanning(_FFT + 1)[:-1].astype(np.float32)


class SpeakerEncoder:
    """One per process; calls may come from several threads."""

    def __init__(self, model: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )

    @classmethod
    def load(cls, directory: Path) -> Self:
        """
        Args:
            directory: as returned by `fetch(RESEMBLYZER)`.
        Raises:
            BadInputError: the checkpoint is broken.
        """
        return cls(_graph(read_weights(directory / FILE, "model_state")))

    def embed(self, sounds: Sequence[Pcm], lengths: Sequence[int] = ()) -> Floats:
        """
        Args:
            sounds: of one length, each [n] int16 at INPUT_RATE_HZ.
            lengths: in samples, at most n: embeddings of the sounds' beginnings; (): of all of it.
        Returns:
            [n_lengths, n_sounds, EMBEDDING], each of length 1.
        """
        power = np.stack([spectral_power(at_level(pcm)) for pcm in sounds], axis=1)
        ends = [len(power) - 1] if not lengths else [n // _HOP for n in lengths]
        [found] = self._session.run(None, {"power": power, "at": np.array(ends, np.int64)})
        embeddings: Floats = found / np.maximum(np.linalg.norm(found, axis=2, keepdims=True), 1e-9)
        return embeddings


def at_level(pcm: Pcm) -> Floats:
    """[n] float32 at _LEVEL_DB; silence stays as it is."""
    sound: Floats = pcm.astype(np.float32) / np.float32(32_768)
    rms = float(np.sqrt(np.mean(sound**2))) if len(sound) else 0.0
    if rms >= _LEAST_RMS:
        sound *= np.float32(10 ** (_LEVEL_DB / 20) / rms)
    return sound


def spectral_power(sound: Floats) -> Floats:
    """[1 + n // 160, 201]: of frames of 25 ms, one every 10 ms."""
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(sound, _FFT // 2), _FFT)[::_HOP]
    spectrum = np.fft.rfft(frames * _HANN)
    power: npt.NDArray[np.float32] = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    return power


def _graph(weights: dict[str, Floats]) -> bytes:
    """Inputs: `power` [frames, n, 201]; `at` [m], frames. Output: [m, n, EMBEDDING], not scaled."""
    graph = Graph()
    # Here and not in numpy, whose products of matrices take all cores.
    x = graph.add("MatMul", "power", slaney_filters(_N_MELS, _FFT, INPUT_RATE_HZ).T)
    for layer in range(_N_LAYERS):
        w, r, b, c = (
            _gates(weights[f"lstm.{name}_l{layer}"])
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        both = np.concatenate((b, c))[None]
        x = graph.add("LSTM", x, w[None], r[None], both, hidden_size=EMBEDDING)
        x = graph.add("Squeeze", x, ints([1]))
    x = graph.add("MatMul", graph.add("Gather", x, "at"), weights["linear.weight"].T)
    x = graph.add("Add", x, weights["linear.bias"])
    graph.add("Relu", x, name="embeddings")
    return graph.model(
        "speaker_encoder",
        inputs={
            "power": (TensorProto.FLOAT, ("frames", "n", _FFT // 2 + 1)),
            "at": (TensorProto.INT64, ("m",)),
        },
        outputs={"embeddings": (TensorProto.FLOAT, ("m", "n", EMBEDDING))},
    )


def _gates(rows: Floats) -> Floats:
    """PyTorch's order is input, forget, cell, output; that of ONNX input, output, forget, cell."""
    i, f, c, o = np.split(rows, 4)
    return np.concatenate((i, o, f, c))
