"""A text that a talker speaks word for word, from the thinker's own tokens.

In: the text of a request. Out: what of it has a sound; "" if nothing has. Pure.
A talker makes noise of what it cannot read, for as long as its bound allows.
"""

import re
import unicodedata

from sglang_live.speakable.pieces import Pieces
from sglang_live.speakable.style import SpeechStyle, is_speakable

_MARKUP = re.compile(r"<!--.*?(?:-->|\Z)|</?[a-zA-Z][^<>]*>", re.DOTALL)
# Control, format, private and unassigned characters, other symbols such as emoji, and what modifies
# these: variation selectors, marks around them.
_SILENT = frozenset(("Cc", "Cf", "Co", "Cs", "Cn", "So", "Sk", "Me"))


def spoken_text(text: str, style: SpeechStyle | None) -> str:
    """
    Args:
        style: of a talker that reads words alone. None: it reads whatever is written, in any
            script.
    """
    if style is not None:
        pieces = Pieces(style)
        return " ".join(p.spoken for p in (*pieces.add(text), *pieces.end()) if p.spoken)
    kept = "".join(map(_heard, _MARKUP.sub(" ", text)))
    return kept if is_speakable(kept) else ""


def _heard(char: str) -> str:
    if char.isspace():
        return char
    is_selector = "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
    return "" if is_selector or unicodedata.category(char) in _SILENT else char
