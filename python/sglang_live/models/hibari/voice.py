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
import numpy.typing as npt

from sglang_live.errors import BadInputError
from sglang_live.models.hibari.reading import Phoneme, Reader, pieces, word_ends
from sglang_live.models.packages.code import import_fetched
from sglang_live.models.speech import Speech, SpokenWord

MAX_CHARACTERS = 1000
# The limits of the package's documentation.
MIN_SPEED, MAX_SPEED = 0.5, 2.0
# Of one run of the network, as in the package.
_MAX_PHONEMES = 400
# Of the noise in unvoiced sounds: a sentence sounds the same each time.
_SEED = 0
_SPECTRA = ("lh", "theta", "ln", "lr", "phi", "f0")

Floats = npt.NDArray[np.float32]


class HibariVoice:
    """One per process; a Voice (models/speech.py). May be used by several threads."""

    def __init__(self, network: "Network", reader: Reader, voices: Sequence[str]) -> None:
        self._network = network
        self._reader = reader
        self._voices = tuple(voices)

    @classmethod
    def load(cls, directory: Path, *, n_threads: int = 1) -> Self:
        """Load the files of the fetched package.

        Args:
            directory: as returned by `fetch(HIBARI)`.
            n_threads: of onnxruntime, for one call.
        """
        package = import_fetched(directory, "hibari")
        assets = directory / "hibari" / "assets"
        alphabet = json.loads((assets / "vocab.json").read_text(encoding="utf-8"))
        voices = json.loads((assets / "voices.json").read_text(encoding="utf-8"))
        network = Network(assets / "hibari.onnx", package.tts.dsp, alphabet, n_threads)
        reader = Reader(package, alphabet)
        return cls(network, reader, [name for name in voices if voices[name].get("bundled")])

    @property
    def sample_rate_hz(self) -> int:
        return self._network.sample_rate_hz

    @property
    def voices(self) -> tuple[str, ...]:
        return self._voices

    @property
    def max_characters(self) -> int:
        return MAX_CHARACTERS

    def synthesise(self, text: str, voice: str, speed: float = 1.0) -> Speech:
        """Read a text aloud, sentence by sentence.

        Args:
            text: at most MAX_CHARACTERS. What has no pronunciation, such as an emoji or another
                script, makes no sound.
            voice: one of `voices`.
            speed: MIN_SPEED to MAX_SPEED.
        Raises:
            BadInputError: one of them is beyond its limits.
        """
        if len(text) > MAX_CHARACTERS:
            raise BadInputError(
                f"The text has {len(text)} characters; at most {MAX_CHARACTERS} are spoken at "
                "once. Send it in pieces, such as sentences."
            )
        if voice not in self._voices:
            raise BadInputError(f"Unknown voice {voice!r}: {', '.join(self._voices)} can be used.")
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise BadInputError(f"Speed {speed}: from {MIN_SPEED} to {MAX_SPEED} can be used.")
        words, sentences = self._reader.read(text)
        waves: list[Floats] = []
        ends: list[tuple[int, float]] = []
        n_samples = 0
        for sentence in sentences:
            for piece in pieces(sentence, _MAX_PHONEMES):
                wave, piece_ends = self._network.speak(piece, speed)
                ends += [
                    (phoneme.word, (n_samples + int(end)) / self.sample_rate_hz)
                    for phoneme, end in zip(piece, piece_ends, strict=True)
                    if not phoneme.is_silent
                ]
                waves.append(wave)
                n_samples += len(wave)
        if not waves:
            return Speech(pcm=np.zeros(0, np.int16))
        wave = np.clip(np.concatenate(waves), -1.0, 1.0)
        return Speech(
            pcm=(wave * 32767).astype(np.int16),
            words=tuple(SpokenWord(end, end_s) for end, end_s in word_ends(words, ends)),
        )


class Network:
    """The acoustic network, and the package's signal processing after it."""

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

    def speak(self, piece: Sequence[Phoneme], speed: float) -> tuple[Floats, npt.NDArray[np.int64]]:
        """
        Returns:
            wave: [n_samples] float32, about -1 to 1.
            ends: [n_phonemes] int64, the sample after each phoneme's last.
        """
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
