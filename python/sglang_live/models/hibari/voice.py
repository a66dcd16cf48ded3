"""hibari through onnxruntime: phonemes to a spectrum, which numpy makes a waveform.

In: text. Out: int16 at 24 kHz, and the end of each word. Weights, pronunciation rules and signal
processing are those of the package hibari-tts (packages/pins.py), imported from the fetched
directory. Only the network is run here, because its durations are needed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from sglang_live.models.hibari.reading import EnglishReader, english_alphabet
from sglang_live.models.packages.code import import_fetched
from sglang_live.models.phoneme_voice import Ends, Floats, PhonemeVoice
from sglang_live.models.phonemes import Phoneme

# Of the noise in unvoiced sounds: a sentence sounds the same each time.
_SEED = 0
_SPECTRA = ("lh", "theta", "ln", "lr", "phi", "f0")


class HibariVoice(PhonemeVoice):
    """One per process."""

    @classmethod
    def load(cls, directory: Path, *, n_threads: int = 1) -> Self:
        """Load the files of the fetched package.

        Args:
            directory: as returned by `fetch(HIBARI)`.
            n_threads: of onnxruntime, for one call.
        """
        package = import_fetched(directory, "hibari")
        assets = directory / "hibari" / "assets"
        alphabet = english_alphabet(directory)
        voices = json.loads((assets / "voices.json").read_text(encoding="utf-8"))
        network = Network(assets / "hibari.onnx", package.tts.dsp, alphabet, n_threads)
        reader = EnglishReader(package, alphabet)
        return cls(network, reader, [name for name in voices if voices[name].get("bundled")])


class Network:
    """The acoustic network, and the package's signal processing after it."""

    # Of one run, as in the package.
    max_phonemes = 400
    times_phonemes = True

    def __init__(self, path: Path, dsp: Any, alphabet: dict[str, int], n_threads: int) -> None:
        """
        Args:
            dsp: the package's module.
            alphabet: id of each phoneme.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = n_threads
        options.inter_op_num_threads = 1
        model, durations = _prepared(path)
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        self._outputs = [*_SPECTRA, durations]
        self._dsp = dsp
        self._alphabet = alphabet

    @property
    def sample_rate_hz(self) -> int:
        rate_hz: int = self._dsp.SR
        return rate_hz

    def speak(self, piece: Sequence[Phoneme], voice: str, speed: float) -> tuple[Floats, Ends]:
        """See AcousticNetwork; there is one voice."""
        ids = [0, *(self._alphabet[phoneme.sign] for phoneme in piece), 0]
        inputs = {
            "ids": np.array([ids], np.int64),
            "speed": np.array([speed], np.float32),
        }
        *spectra, durations = self._session.run(self._outputs, inputs)
        rng = np.random.default_rng(_SEED)
        wave: Floats = self._dsp.synth(*(spectrum[0] for spectrum in spectra), rng)
        ends = np.cumsum(durations.reshape(-1).astype(np.int64))
        # A unit of duration is two frames. Without the padding before and after.
        return wave, ends[1:-1] * len(wave) // ends[-1]


def _prepared(path: Path) -> tuple[bytes, str]:
    """The model with one output more: [1, n_ids], the duration of each id.

    Returns:
        The model for onnxruntime, and the output's name.
    """
    import onnx

    model = onnx.load(str(path))
    # The network repeats each id's features for its duration, which it finds in the running sum.
    [sums] = [node for node in model.graph.node if node.op_type == "CumSum"]
    durations: str = sums.input[0]
    model.graph.output.append(onnx.ValueInfoProto(name=durations))
    # Products of uint8 and int8 overflow on x86 processors that lack VNNI. With weights and zero
    # points as uint8, 128 higher, the results are the same everywhere. onnxruntime's option for
    # that (interaction/endpoint.py) fails where matrices share a zero point.
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT8:
            values = onnx.numpy_helper.to_array(tensor).astype(np.int16) + 128
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.uint8), tensor.name))
    return model.SerializeToString(), durations
