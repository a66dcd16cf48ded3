"""Words for the commands of LaTeX that are frequent in responses; others are left out."""

import re

from sglang_live.speakable.numbers import listed

_SYMBOLS = {
    "times": "×", "cdot": "×", "div": "÷", "pm": "±", "leq": "≤", "le": "≤", "geq": "≥",
    "ge": "≥", "neq": "≠", "ne": "≠", "approx": "≈", "infty": "∞", "rightarrow": "→", "to": "→",
    "implies": "⇒", "Rightarrow": "⇒", "equiv": "≡", "in": "∈", "sum": "∑", "int": "∫",
    "partial": "∂", "circ": "°", "ldots": "…", "cdots": "…", "dots": "…", "ln": "L N",
}  # fmt: skip
_WORDS = frozenset(
    listed(
        "alpha beta gamma delta epsilon zeta eta theta lambda mu nu xi pi rho sigma tau "
        "phi chi psi omega Gamma Delta Theta Lambda Pi Sigma Phi Psi Omega log sin cos "
        "tan exp max min lim"
    )
)
_GROUP = r"\{([^{}]*)\}"
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[^{}]*\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*" + _GROUP + r"\s*" + _GROUP)
_ROOT = re.compile(r"\\sqrt\s*" + _GROUP)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|mathit|boxed|operatorname)\s*" + _GROUP)
_POWER = re.compile(r"\^" + _GROUP)
_INDEX = re.compile(r"(?<=[A-Za-z0-9])_(?:" + _GROUP + r"|(?=\w))")
_COMMAND = re.compile(r"\\([A-Za-z]+)(?![A-Za-z])\s?")
_SPACE = re.compile(r"\\(?:[,;:! ]|\\)|&(?=\s*[=<>])")
_DELIMITER = re.compile(r"\\[()\[\]]|\$\$")
_INLINE = re.compile(r"\$(?!\d[\d,.]*\s)([^$\n]*[\\^_=][^$\n]*)\$(?!\d)")
_DEPTH = 4


def _command(found: re.Match[str]) -> str:
    name = found[1]
    if name in _SYMBOLS:
        return f" {_SYMBOLS[name]} "
    return f" {name} " if name in _WORDS else " "


def without_latex(text: str) -> str:
    """The text with symbols and words for its commands, on which maths.py goes on."""
    if "\\" not in text and "$" not in text:
        return text
    # A folder's name is no command.
    if "\\" in text and re.search(r"[A-Za-z]:\\", text):
        return text.replace("\\", " ")
    text = _ENVIRONMENT.sub(" ", text.replace("{,}", ","))
    text = _INLINE.sub(r" \1 ", _DELIMITER.sub(" ", text))
    for _ in range(_DEPTH):
        before = text
        text = _TEXT.sub(r" \1 ", text)
        text = _ROOT.sub(r" √ \1 ", text)
        text = _FRACTION.sub(_fraction, text)
        text = _POWER.sub(r"^\1", text)
        if text == before:
            break
    if "\\" in text:
        text = _INDEX.sub(r" \1", text)
    return _COMMAND.sub(_command, _SPACE.sub(" ", text))


def _fraction(found: re.Match[str]) -> str:
    above, below = found[1].strip(), found[2].strip()
    return f" {above}/{below} " if (above + below).isdigit() else f" {above} over {below} "
