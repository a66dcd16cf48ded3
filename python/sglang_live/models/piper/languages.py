"""Scripts of the languages that voices speak."""

from sglang_live.speakable.style import SpeechStyle

_LATIN = frozenset(("LATIN",))
_SCRIPTS = {
    "CYRILLIC": "ba be bg cv kk ky mk mn ru sr tt uk",
    "GREEK": "el",
    "ARABIC": "ar fa ku ps sd ug ur",
    "HEBREW": "he",
    "DEVANAGARI": "hi kok mr ne",
    "BENGALI": "as bn bpy",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "ORIYA": "or",
    "TAMIL": "ta",
    "TELUGU": "te",
    "SINHALA": "si",
    "MYANMAR": "my",
    "THAI": "th",
    "GEORGIAN": "ka",
    "ARMENIAN": "hy hyw",
    "ETHIOPIC": "am",
    "HANGUL": "ko",
    "CJK": "cmn hak ja yue zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
}  # fmt: skip


def style_of(language: str) -> SpeechStyle:
    """
    Args:
        language: as espeak-ng names it, such as "de" or "pt-br".
    """
    code = language.partition("-")[0]
    if code == "en":
        return SpeechStyle()
    own = {script for script, codes in _SCRIPTS.items() if code in codes.split()}
    return SpeechStyle(scripts=_LATIN | own, english=False, says_code="", says_table="")
