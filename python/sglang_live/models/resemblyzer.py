"""Resemblyzer's speaker encoder through onnxruntime: three LSTM layers over a mel spectrogram.

In: speech, int16 at 16 kHz. Out: embeddings of length 1; two of one voice point in similar
directions. The weights are those of the package Resemblyzer (models/packages.py), whose code is not
used. Source: generalized end-to-end loss for speaker verification, arXiv:1710.10467.
"""

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.onnx_graph import Graph, ints
from sglang_live.models.speech import Pcm
from sglang_live.sound.mel import slaney_filters

Floats = npt.NDArray[np.float32]

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_MOST_FLOATS = 1 << 24


# --- weights of torch.save, without torch ---
# In PyTorch's format before 1.6 the file is five pickles (a number, a version, facts of the
# machine, the object with references to storages, the storages' keys), then each storage as its
# length in elements and its bytes. Of the pickles only dictionaries and float32 tensors are
# accepted, so that a changed file runs no code.


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[str, list[Floats]] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "FloatStorage"): np.float32,
            ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name} is not data of a checkpoint")
        return known[module, name]

    def persistent_load(self, pid: Any) -> list[Floats]:
        """The storage, an empty list until its bytes are read."""
        return self.storages.setdefault(str(pid[2]), [])


class _Tensor:
    """A tensor whose storage is read later."""

    def __init__(
        self, storage: list[Floats], offset: int, shape: tuple[int, ...], *_rest: Any
    ) -> None:
        self._storage = storage
        self._offset = offset
        self._shape = shape

    def array(self) -> Floats:
        n = int(np.prod(self._shape))
        [floats] = self._storage
        return floats[self._offset : self._offset + n].reshape(self._shape)


def read_weights(path: Path, part: str) -> dict[str, Floats]:
    """The tensors of one dictionary of the checkpoint.

    Raises:
        BadInputError: it is no such file.
    """
    try:
        with path.open("rb") as file:
            return _read(file, part)
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path} is not the checkpoint that is needed: {error}") from error


def _read(file: BinaryIO, part: str) -> dict[str, Floats]:
    if _Reader(file).load() != _MAGIC or _Reader(file).load() != _VERSION:
        raise ValueError("it does not begin as a checkpoint does")
    _Reader(file).load()  # facts of the machine that wrote it
    reader = _Reader(file)
    tensors = reader.load()[part]
    for key in _Reader(file).load():
        n = int(np.frombuffer(file.read(8), "<i8")[0])
        if not 0 <= n <= _MOST_FLOATS:
            raise ValueError(f"a storage of {n} elements")
        floats = np.frombuffer(file.read(4 * n), "<f4")
        if len(floats) < n:
            raise EOFError("it ends within a storage")
        reader.storages.setdefault(str(key), []).append(floats)
    return {name: tensor.array() for name, tensor in tensors.items()}


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
