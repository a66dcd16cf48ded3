"""English phonemes as espeak-ng writes them, from those of hibari's reader.

The reader has the alphabet of Kokoro (misaki's), which writes diphthongs and affricates as one
sign and knows no length: https://github.com/hexgrad/misaki/blob/main/EN_PHONES.md
"""

from collections.abc import Container, Sequence

from sglang_live.models.phonemes import Phoneme, TextReader, Word

_SIGNS = {
    "A": "eɪ", "I": "aɪ", "O": "oʊ", "Q": "əʊ", "W": "aʊ", "Y": "ɔɪ",
    "ʤ": "dʒ", "ʧ": "tʃ", "T": "ɾ", "ᵊ": "ə",
    "u": "uː", "ɑ": "ɑː", "ɔ": "ɔː",
    "—": ",", "…": ".",
}  # fmt: skip
_RHOTIC = {"ɜ": "ɜː", "ə": "ɚ"}
_STRESS = frozenset("ˈˌ")
_VOWELS = frozenset("AIOQWYaeiouæɐɑɒɔəɚɛɜɪʊʌᵊᵻ")


class EnglishAsEspeak:
    """A TextReader."""

    def __init__(self, reader: TextReader, alphabet: Container[str]) -> None:
        """alphabet: the phonemes that the network knows; others make no sound."""
        self._reader = reader
        self._alphabet = alphabet

    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        words, sentences = self._reader.read(text)
        known = [
            [sign for sign in as_espeak(sentence) if sign.sign in self._alphabet]
            for sentence in sentences
        ]
        return words, [s for s in known if any(not sign.is_silent for sign in s)]


def as_espeak(phonemes: Sequence[Phoneme]) -> list[Phoneme]:
    """The same phonemes in espeak-ng's signs, of which one may be several."""
    found: list[Phoneme] = []
    signs = "".join(phoneme.sign for phoneme in phonemes)
    at = 0
    while at < len(signs):
        sign, following = signs[at], signs[at + 1 : at + 3]
        n_read, written = 1, _SIGNS.get(sign, sign)
        if sign in _RHOTIC and following[:1] == "ɹ":
            # The r is heard only before another vowel.
            after = following[1:].strip("ˈˌ") or signs[at + 3 : at + 4]
            written, n_read = _RHOTIC[sign], 1 if after in _VOWELS and after else 2
        elif sign == "i" and at and signs[at - 1] in _STRESS:
            written = "iː"
        found += [Phoneme(character, phonemes[at].word) for character in written]
        at += n_read
    return found
