"""Whisper through CTranslate2: log-mel features, language detection, and greedy decoding.

In: int16 at 16 kHz. Out: text with capitals and punctuation. The weights are the user's, in
CTranslate2's form. That is imported when they are loaded: the server finds them without it.
Source: Robust Speech Recognition via Large-Scale Weak Supervision, arXiv:2212.04356.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np

from sglang_live.core import INPUT_RATE_HZ, HeardToken
from sglang_live.errors import BadInputError
from sglang_live.models.family import read_json
from sglang_live.models.speech import FilesKind, Pcm, SpeechModel, computing_threads
from sglang_live.models.utterances import unlooped, utterances

FILES = ("vocabulary.json", "vocabulary.txt")

START = "<|startoftranscript|>"
END = "<|endoftext|>"
TRANSLATE, TRANSCRIBE = "<|translate|>", "<|transcribe|>"
NO_TIMESTAMPS = "<|notimestamps|>"
# Bytes that are written as themselves; the others follow from 256 on, in order.
_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


class Vocabulary:
    """Tokens by id."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """
        Raises:
            BadInputError: a token is missing without which nothing can be recognised.
        """
        self._ids = {token: number for number, token in enumerate(tokens)}
        for token in (START, END, NO_TIMESTAMPS):
            if token not in self._ids:
                raise BadInputError(f"the vocabulary lacks {token}: it is none of Whisper's")
        # What follows the text's tokens is special: languages, tasks, timestamps.
        self._texts = [_bytes_of(token) for token in tokens[: self._ids[END]]]

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Raises BadInputError if there is no vocabulary, or it is broken."""
        path = next((directory / name for name in FILES if (directory / name).is_file()), None)
        if path is None:
            raise BadInputError(f"{directory} has no {' or '.join(FILES)}")
        try:
            text = path.read_text(encoding="utf-8")
            tokens = (
                json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
            )
            return cls(tokens)
        except (ValueError, TypeError, KeyError, BadInputError) as error:
            raise BadInputError(f"{path}: {error}") from error

    def id_of(self, token: str) -> int:
        return self._ids[token]

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes that the model detects and takes, such as "de"; empty: it knows English only."""
        # Models of English have the other tokens, too. CTranslate2 tells them apart by this one.
        if "" not in self._ids:
            return ()
        # They stand between the start and the tasks, of which translation is the first.
        ids = range(self._ids[START] + 1, min(self._ids[TRANSCRIBE], self._ids[TRANSLATE]))
        tokens = {number: token for token, number in self._ids.items()}
        return tuple(tokens[number].strip("<|>") for number in ids)

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """The text of each token of text."""
        return [self._texts[token] for token in ids if token < len(self._texts)]

    def text(self, ids: Iterable[int]) -> str:
        """The tokens' text, with its spaces. What is no whole character is left out."""
        return b"".join(self.pieces(ids)).decode(errors="ignore")


def byte_characters() -> list[str]:
    """The character of each byte."""
    others = iter(range(256, 512))
    return [chr(byte if byte in _PRINTABLE else next(others)) for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def _bytes_of(token: str) -> bytes:
    return bytes(_BYTES[character] for character in token)


_WEIGHTS = "model.bin"


def is_whisper(path: Path) -> bool:
    # CTranslate2 writes the same files for translators; only Whisper's config suppresses tokens.
    config = path / "config.json"
    return (path / _WEIGHTS).is_file() and config.is_file() and "suppress_ids" in read_json(config)


def whisper_at(path: Path) -> SpeechModel:
    """Raises BadInputError if its vocabulary is broken, or CTranslate2 is not installed."""
    if find_spec("ctranslate2") is None:
        raise BadInputError(
            f"{path} needs CTranslate2, which is not installed: pip install 'sglang-live[whisper]'"
        )
    languages = Vocabulary.load(path).languages
    return SpeechModel(
        path=path,
        load="sglang_live.models.whisper:WhisperRecogniser.load",
        offers=languages or ("en",),
        gives=("details", "translations") if languages else ("details",),
    )


WHISPER = FilesKind(
    holds="Whisper for CTranslate2 (model.bin, config.json, vocabulary.json)",
    claims=is_whisper,
    read=whisper_at,
)


# Shorter audio holds no word.
MIN_S = 0.1
# Text at 20 tokens a second, as in scripts of which each character is several tokens: a model that
# hallucinates must not decode to its limit after a short utterance.
MAX_TOKENS_PER_S, MIN_TOKENS = 20, 32
# Of all Whisper models; the text of one window has half of it, as in the authors' decoding.
_MAX_TOKENS = 448
# Frames of the mel spectrogram, and of the encoder, which are aligned.
_FEATURE_SAMPLES, _ALIGNED_SAMPLES = 160, 320
_LEAST_PROBABILITY = 1e-10
# The authors' criterion for audio without speech: the model says so, and is unsure of its text.
_NO_SPEECH, _UNSURE = 0.6, -1.0
# Their words are not separated by spaces.
_UNSPACED = frozenset(("ja", "lo", "my", "th", "yue", "zh"))
# A turn and a transcription of a file may be recognised at the same time (stages/thinker/hearing).
_WORKERS = 2


class WhisperRecogniser:
    """One per process; a Recogniser (models/speech.py). May be used by several threads."""

    def __init__(self, model: Any, features: Any, vocabulary: Vocabulary, language: str) -> None:
        """
        Args:
            model: a ctranslate2.models.Whisper.
            features: transformers' feature extractor.
            language: see `load`.
        """
        self._model = model
        self._features = features
        self._vocabulary = vocabulary
        self._language = language

    @classmethod
    def load(cls, directory: Path, *, language: str = "", n_threads: int = 0) -> Self:
        """
        Args:
            language: that users speak, such as "de"; "": detected in each utterance.
            n_threads: for one call; 0: see computing_threads.
        Raises:
            BadInputError: the model cannot be read.
        """
        import ctranslate2
        from transformers import WhisperFeatureExtractor

        try:
            model = ctranslate2.models.Whisper(
                str(directory),
                inter_threads=_WORKERS,
                intra_threads=n_threads or computing_threads(),
            )
        except (RuntimeError, ValueError) as error:
            raise BadInputError(f"CTranslate2 cannot read {directory}: {error}") from error
        features = WhisperFeatureExtractor(feature_size=model.n_mels)
        return cls(model, features, Vocabulary.load(directory), language)

    def transcribe(self, pcm: Pcm) -> str:
        """Recognise speech of any length; longer audio is cut where it is quietest.

        Args:
            pcm: [n] int16, mono, at INPUT_RATE_HZ.
        Returns:
            The text; "" for audio shorter than MIN_S, for zeros, and without speech.
        """
        language, texts = "", []
        for _, piece, encoded, language in self._heard(pcm):
            ids = self._decode(encoded, self._prompt(language, TRANSCRIBE), len(piece))
            texts.append(" ".join(self._vocabulary.text(ids).split()))
        gap = "" if language in _UNSPACED else " "
        return gap.join(text for text in texts if text)

    def transcribe_in_detail(self, pcm: Pcm, *, translates: bool) -> list[HeardToken]:
        """As transcribe(), token by token. Cross-attention says where a token is heard.

        Source: Whisper's own alignment (dynamic time warping of its alignment heads).
        """
        found = []
        for begin, piece, encoded, language in self._heard(pcm):
            prompt = self._prompt(language, TRANSLATE if translates else TRANSCRIBE)
            ids = self._decode(encoded, prompt, len(piece))
            ids = [token for token in ids if token < self._vocabulary.id_of(END)]
            if not ids:
                continue
            n_frames = -(-len(piece) // _FEATURE_SAMPLES)
            [aligned] = self._model.align(encoded, prompt[:-1], [ids], n_frames)
            begins = {token: at for token, at in reversed(aligned.alignments)}
            # The end of the text is aligned, too.
            times_s = [
                (begin + begins.get(n, n_frames // 2) * _ALIGNED_SAMPLES) / INPUT_RATE_HZ
                for n in range(len(ids) + 1)
            ]
            for n, text in enumerate(self._vocabulary.pieces(ids)):
                sure = max(aligned.text_token_probs[n], _LEAST_PROBABILITY)
                found.append(HeardToken(text, math.log(sure), times_s[n], times_s[n + 1]))
        return found

    def _heard(self, pcm: Pcm) -> Iterator[tuple[int, Pcm, Any, str]]:
        """Where each piece begins, the piece, the encoder's output and the language."""
        language, begin = self._language, 0
        for piece in utterances(pcm):
            # In digital silence the model hears "you".
            if len(piece) >= MIN_S * INPUT_RATE_HZ and piece.any():
                encoded = self._encoded(piece)
                # The language of an utterance is that of its beginning.
                language = language or self._detected(encoded)
                yield begin, piece, encoded, language
            begin += len(piece)

    def _prompt(self, language: str, task: str) -> list[int]:
        tokens = [START]
        if self._model.is_multilingual:
            tokens += [f"<|{language}|>", task]
        return [self._vocabulary.id_of(token) for token in (*tokens, NO_TIMESTAMPS)]

    def _encoded(self, piece: Pcm) -> Any:
        """The encoder's output for up to 30 s, which are padded to 30 s."""
        from ctranslate2 import StorageView

        wave = piece.astype(np.float32) / 32768
        found = self._features(wave, sampling_rate=INPUT_RATE_HZ, return_tensors="np")
        return self._model.encode(StorageView.from_array(found["input_features"]))

    def _detected(self, encoded: Any) -> str:
        if not self._model.is_multilingual:
            return "en"
        [found] = self._model.detect_language(encoded)
        token, _ = found[0]
        code: str = token.strip("<|>")
        return code

    def _decode(self, encoded: Any, prompt: list[int], n_samples: int) -> list[int]:
        """Token ids of one piece, without the end."""
        n_most = MIN_TOKENS + int(MAX_TOKENS_PER_S * n_samples / INPUT_RATE_HZ)
        n_most = min(n_most, _MAX_TOKENS // 2)
        [result] = self._model.generate(
            encoded,
            [prompt],
            beam_size=1,
            # At most half of it is text.
            max_length=2 * n_most,
            return_scores=True,
            return_no_speech_prob=True,
        )
        if result.no_speech_prob > _NO_SPEECH and result.scores[0] < _UNSURE:
            return []
        ids: list[int] = result.sequences_ids[0]
        # A text that ends before its limit is said, also where it repeats itself.
        return unlooped(ids) if len(ids) >= n_most else ids
