"""An independent recogniser that finds which sentence was spoken.

pocketsphinx, with a grammar of all possible sentences: the answers and distractors. Recognition
without a grammar is no measure here: it gets most words of the synthesiser itself wrong.
"""

import re
from dataclasses import dataclass, field

import numpy as np
import soxr
from pocketsphinx import Config, Decoder

_RATE_HZ = 16_000
_PAUSE = np.zeros(round(0.3 * _RATE_HZ))


@dataclass(slots=True)
class Judge:
    """sentences: all possible sentences, in any spelling; words it has not are left out."""

    sentences: list[str]
    _decoder: Decoder = field(init=False)
    _spelt: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = Decoder(Config(lm=None, loglevel="FATAL"))
        self._spelt = {self._known_words(s): s for s in self.sentences}
        alternatives = " | ".join(spelt for spelt in self._spelt if spelt)
        grammar = f"#JSGF V1.0;\ngrammar said;\npublic <said> = {alternatives};\n"
        self._decoder.add_jsgf_string("said", grammar)
        self._decoder.activate_search("said")

    def hear(self, sound: np.ndarray, rate_hz: int) -> str | None:
        """The most likely sentence, or None if none fits.

        Args:
            sound: float in [-1, 1], mono.
        """
        samples = np.concatenate([_PAUSE, soxr.resample(sound, rate_hz, _RATE_HZ), _PAUSE])
        # Digital silence has no logarithm.
        samples = samples + 1e-4 * np.random.default_rng(0).standard_normal(len(samples))
        pcm = (np.clip(samples, -1, 1) * 30_000).astype(np.int16)
        self._decoder.start_utt()
        self._decoder.process_raw(pcm.tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return self._spelt.get(found.hypstr.strip()) if found else None

    def _known_words(self, sentence: str) -> str:
        words = re.findall(r"[a-z']+", sentence.lower())
        return " ".join(word for word in words if self._decoder.lookup_word(word))
