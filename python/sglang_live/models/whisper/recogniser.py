"""Whisper through CTranslate2: log-mel features, language detection, and greedy decoding.

In: int16 at 16 kHz. Out: text with capitals and punctuation. The weights are the user's.
Source: Robust Speech Recognition via Large-Scale Weak Supervision, arXiv:2212.04356.
"""

from pathlib import Path
from typing import Any, Self

import numpy as np

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.speech import Pcm
from sglang_live.models.threads import computing_threads
from sglang_live.models.utterances import unlooped, utterances
from sglang_live.models.whisper.vocabulary import NO_TIMESTAMPS, START, TRANSCRIBE, Vocabulary

# Shorter audio holds no word.
MIN_S = 0.1
# Text at 20 tokens a second, as in scripts of which each character is several tokens: a model that
# hallucinates must not decode to its limit after a short utterance.
MAX_TOKENS_PER_S, MIN_TOKENS = 20, 32
# Of all Whisper models; the text of one window has half of it, as in the authors' decoding.
_MAX_TOKENS = 448
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
        language = self._language
        texts = []
        for piece in utterances(pcm):
            # In digital silence the model hears "you".
            if len(piece) < MIN_S * INPUT_RATE_HZ or not piece.any():
                continue
            encoded = self._encoded(piece)
            # The language of an utterance is that of its beginning.
            language = language or self._detected(encoded)
            text = self._vocabulary.text(self._decode(encoded, language, len(piece)))
            texts.append(" ".join(text.split()))
        gap = "" if language in _UNSPACED else " "
        return gap.join(text for text in texts if text)

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

    def _decode(self, encoded: Any, language: str, n_samples: int) -> list[int]:
        """Token ids of one piece, without the end."""
        tokens = [START]
        if self._model.is_multilingual:
            tokens += [f"<|{language}|>", TRANSCRIBE]
        prompt = [self._vocabulary.id_of(token) for token in (*tokens, NO_TIMESTAMPS)]
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
