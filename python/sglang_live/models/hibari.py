"""hibari through onnxruntime: phonemes to a spectrum, which numpy makes a waveform.

In: words, as speakable/ makes them of a text. Out: int16 at 24 kHz, and the end of each word.
Weights, pronunciation rules and signal processing are those of the package hibari-tts
(models/packages.py), imported from the fetched directory: its rules turn words into phonemes
(misaki's, ported). Here the words are made safe for them, each phoneme is traced to a word, and the
network is run, because its durations are needed.
"""

import json
import re
import unicodedata
from collections.abc import Container, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import numpy as np

from sglang_live.models.packages import import_fetched
from sglang_live.models.phoneme_voice import Ends, Floats, Phoneme, PhonemeVoice, Word

# The rules take time with the third power of a word's length; no English word is longer.
_MAX_WORD = 40
# They have no name for larger numbers, which are read digit by digit.
_MAX_DIGITS = 15
_LONG_NUMBER = re.compile(rf"(?:\d[,.]?){{{_MAX_DIGITS + 1},}}")
_SYMBOL_RUN = re.compile(r"([^\w\s])\1{3,}")
# Phonemes in place of a text, in the package's own notation: [text](/phonemes/).
_LINK = "["


class EnglishReader:
    """Words to phonemes of American English with the package's rules; a TextReader.

    The package's normalisation is left out: of words it makes others, as of the last one in "He
    said no.", for which it says number, and in "Type C", for which it says type one hundred.
    """

    def __init__(self, package: Any, alphabet: Container[str]) -> None:
        """
        Args:
            package: the imported package.
            alphabet: the phonemes that the model knows.
        """
        rules = import_module(f"{package.__name__}.g2p")
        unknown_words = import_module(f"{package.__name__}.g2p.oov")
        # Otherwise its network is loaded at the first unknown word, which threads would race for.
        self._g2p = rules.G2P(oov=unknown_words.OOV())
        self._split = package.Hibari.split_sentences
        self._alphabet = alphabet

    @classmethod
    def load(cls, directory: Path) -> Self:
        """directory: as returned by `fetch(HIBARI)`."""
        return cls(import_fetched(directory, "hibari"), english_alphabet(directory))

    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        """
        Returns:
            The text's words, and the phonemes of each sentence that has some.
        """
        words: list[Word] = []
        sentences = []
        at = 0
        for sentence in self._split(text):
            begin = text.index(sentence, at)
            at = begin + len(sentence)
            in_sentence = [Word(m[0], begin + m.end()) for m in re.finditer(r"\S+", sentence)]
            phonemes = list(self._phonemes(in_sentence, len(words)))
            words += in_sentence
            if not all(phoneme.is_silent for phoneme in phonemes):
                sentences.append(phonemes)
        return words, sentences

    def _phonemes(self, words: Sequence[Word], first: int) -> Iterator[Phoneme]:
        """Phonemes of one sentence, whose first word has the number `first`."""
        given = [
            (part, first + number)
            for number, word in enumerate(words)
            for part in capped(readable(word.written)).split()
        ]
        groups = self._groups(" ".join(part for part, _ in given))
        for signs, (_, number) in zip(groups, given, strict=True):
            for sign in signs:
                if sign in self._alphabet:
                    yield Phoneme(sign, number)

    def _groups(self, text: str) -> Iterator[str]:
        """Phonemes of each word between white space, with the space after it."""
        signs = ""
        tokens = self._g2p.phonemize_tokens(self._g2p.tokenize(text))
        for token in tokens:
            signs += token.phonemes or ""
            if token.whitespace:
                yield f"{signs} "
                signs = ""
        if tokens:
            yield signs


def english_alphabet(directory: Path) -> dict[str, int]:
    """Id of each phoneme, in hibari as in Kokoro.

    Args:
        directory: as returned by `fetch(HIBARI)`.
    """
    path = directory / "hibari" / "assets" / "vocab.json"
    alphabet: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return alphabet


def readable(word: str) -> str:
    """Replace what the package's rules fail at; may return several words, or none."""
    word = "".join(c for c in word if unicodedata.category(c)[0] != "C")
    # Digits in circles and the like.
    word = "".join(unicodedata.normalize("NFKC", c) if c.isdigit() else c for c in word)
    word = _LONG_NUMBER.sub(lambda m: " ".join(c for c in m[0] if c.isdigit()), word)
    return _SYMBOL_RUN.sub(r"\1\1\1", word.replace(_LINK, ""))


def capped(text: str) -> str:
    """Cut words that exceed _MAX_WORD characters."""
    parts = (
        word[at : at + _MAX_WORD] for word in text.split() for at in range(0, len(word), _MAX_WORD)
    )
    return " ".join(parts)


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

    def speak(self, piece: Sequence[Phoneme], voice: str) -> tuple[Floats, Ends]:
        """See AcousticNetwork; there is one voice."""
        ids = [0, *(self._alphabet[phoneme.sign] for phoneme in piece), 0]
        inputs = {
            "ids": np.array([ids], np.int64),
            "speed": np.array([1.0], np.float32),
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
