"""Words with which even a short voice over a response takes the turn: "stop", "wait", "no".

In: the transcript of a short voice. Out: whether it takes the turn. Pure.
Source of the words: `assets/interrupting_words.json`, by language (ISO 639-1).

The list is of words that take the turn and not of back-channels, because a small recogniser writes
a hum as some word: Moonshine tiny recognises 3 of 14 back-channels in recordings of meetings, and
for none of the others it writes a word of this list but "no".
"""

import json
import re
from functools import cache
from pathlib import Path

_WORDS = Path(__file__).parents[2] / "assets" / "interrupting_words.json"
_BETWEEN = re.compile(r"[^\w'-]+")
_WITHOUT_SPACES = frozenset({"ja", "ko", "zh"})


def takes_turn(text: str, language: str | None = None) -> bool:
    """Whether a text begins with such a word.

    Args:
        language: of the speech, as a code such as "en" or "en-GB"; None or another one: any.
    """
    said = " ".join(_BETWEEN.sub(" ", text.casefold()).split()) + " "
    return said.startswith(_beginnings((language or "").casefold().split("-")[0]))


@cache
def _beginnings(code: str) -> tuple[str, ...]:
    by_language: dict[str, list[str]] = json.loads(_WORDS.read_text(encoding="utf-8"))
    codes = [code] if code in by_language else list(by_language)
    return tuple(
        word if each in _WITHOUT_SPACES else f"{word} "
        for each in codes
        for word in by_language[each]
    )
