"""Words of what is written for machines: addresses, files, tags, handles, inline code.

In: text without markdown. Out: the same with words; numbers in names as digits.
"""

import re
from collections.abc import Callable

from sglang_live.speakable.numbers import digits, listed

_TOP = (
    "com org net edu gov io ai dev app co uk de fr us eu ca au jp cn in info me tv xyz tech cloud "
    "int mil ch nl se es it br ru"
)
_SPELLED_TOPS = frozenset(listed("io ai uk de fr us eu ca au jp cn tv ch nl se br ru edu"))
_TOPS = "|".join(_TOP.split())
_FILES = {
    "py": "pie", "json": "jason", "txt": "text", "md": "M D", "js": "J S", "ts": "T S",
    "tsx": "T S X", "jsx": "J S X", "html": "H T M L", "css": "C S S", "yaml": "yamel",
    "yml": "yamel", "toml": "tomel", "csv": "C S V", "pdf": "P D F", "png": "P N G",
    "jpg": "jay peg", "jpeg": "jay peg", "gif": "gif", "svg": "S V G", "mp3": "M P three",
    "mp4": "M P four", "wav": "wave", "zip": "zip", "gz": "G Z", "tar": "tar", "sh": "S H",
    "exe": "E X E", "dll": "D L L", "java": "java", "cpp": "C P P", "rs": "R S", "go": "go",
    "sql": "S Q L", "xml": "X M L", "log": "log", "ini": "ini", "env": "env", "cfg": "config",
    "docx": "doc X", "xlsx": "X L S X", "ipynb": "notebook", "lock": "lock", "conf": "conf",
}  # fmt: skip
_URL = re.compile(
    r"(?:https?://|ftp://|www\.)([\w.-]+)(?::\d+)?((?:[/?#][^\s<>\"'`]*)?)", re.IGNORECASE
)
_EMAIL = re.compile(r"(?:mailto:)?\b([\w.+-]{1,64})@([\w-]{1,64}(?:\.[\w-]{1,64})+)")
_DOMAIN = re.compile(
    rf"(?<![\w.@/-])((?:[a-zA-Z0-9-]{{1,63}}\.){{1,5}}(?:{_TOPS}))(?![\w@-]|\.\w)((?:/[^\s<>\"'`]*)?)"
)
_FILE = re.compile(
    rf"(?<![\w./])((?:[\w-]{{1,64}}\.){{0,3}}[\w-]{{1,64}})?\.({'|'.join(_FILES)})(?![\w/]|\.\w)"
)
_PATH = re.compile(
    r"(?<![\w/.:])(?:~|\.{1,2})?(?:/[\w.@+-]+){2,}/?|(?<![\w/.:])(?:~|\.{1,2})/[\w.-]+"
    rf"|(?<![\w/.:])(?:[\w.-]{{1,64}}/){{1,8}}[\w-]{{1,64}}\.(?:{'|'.join(_FILES)})\b"
)
# A path that is said: few words, none of them an identifier.
_SHORT_PATH = re.compile(r"(?:/[a-zA-Z][a-zA-Z-]{0,15}){1,2}/?")
# Of orders, accounts, flights: capitals with digits behind them, of which no one makes numbers.
_MARKED = re.compile(
    r"(?<![\w&])#((?=[\dA-Z-]*[A-Z])(?=[\dA-Z-]*\d)[\dA-Z]+(?:-[\dA-Z]+)*)(?![\w-])"
)
_ACCOUNT = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[\dA-Z]{4}){3,7}(?: ?[\dA-Z]{1,3})?\b")
_IDENTIFIER = re.compile(
    r"(?<![\w#-])(?:[A-Z]{1,5}(?:-\d+){2,}|[A-Z]{1,5}\d+(?:-[\dA-Z]*\d[\dA-Z]*)+|[A-Z]{1,3}\d{3,})(?![\w-]|\.\d)"
)
_NETWORK = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})/(?=\d{1,2}(?!\w))")
# Each group has its colon: else a long number divides into groups in exponentially many ways.
_IP_V6 = re.compile(
    r"(?<![\w:])(?=[\d:]*(?:[a-fA-F]|::))(?:[\da-fA-F]{1,4}:){1,7}(?::|:?[\da-fA-F]{1,4}(?::[\da-fA-F]{1,4})*)(?![\w:])"
)
_LANGUAGES = {"C++": "C plus plus", "c++": "C plus plus", "C#": "C sharp", "F#": "F sharp"}
_LANGUAGE = re.compile(r"(?<![\w#+])(?:[Cc]\+\+|[CF]#)(?![\w#+])")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# A longer inline code is read, not heard.
MAX_CODE = 60


def camel_words(text: str) -> str:
    return _CAMEL.sub(" ", text)


def _label(text: str) -> str:
    return text.replace("-", " dash ").replace("_", " underscore ").replace("+", " plus ").strip()


def _host(text: str) -> str:
    labels = text.strip(".-").split(".")
    if len(labels) > 2 and labels[0].lower() == "www":
        labels = labels[1:]
    tail = [_top(label) if at else _label(label) for at, label in enumerate(labels)]
    return " dot ".join(label for label in tail if label)


def _top(label: str) -> str:
    low = label.lower()
    return " ".join(low.upper()) if low in _SPELLED_TOPS else _label(label)


def _address(host: str, path: str) -> str:
    # What ends the sentence is no part of the address.
    text = path or host
    ended = text.rstrip(".,;:!?)]}*_")
    rest = text[len(ended) :]
    if not path:
        host = ended
    elif _SHORT_PATH.fullmatch(ended):
        segments = ended.strip("/").replace("-", " ").split("/")
        return f" {' slash '.join((_host(host), *segments))} {rest}"
    return f" {_host(host)} {rest}"


def _email(found: re.Match[str]) -> str:
    name = " dot ".join(_label(part) for part in found[1].split(".") if part)
    return f" {name} at {_host(found[2])} "


def _file(found: re.Match[str]) -> str:
    stem = re.sub(r"[-_]+", " ", (found[1] or "").replace(".", " dot "))
    return f" {stem} dot {_FILES[found[2]]} "


def _path(found: re.Match[str]) -> str:
    parts = [_FILE.sub(_file, part) for part in found[0].strip("/~.").split("/")]
    return " " + " ".join(re.sub(r"[-_]+", " ", part) for part in parts) + " "


def _spelled(text: str) -> str:
    """Letter by letter and digit by digit, with a pause between groups."""
    groups = re.findall(r"[^\W_]+", text)
    return ", ".join(" ".join(digits(char) or char.upper() for char in group) for group in groups)


_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (_URL, lambda found: _address(found[1], found[2])),
    (_EMAIL, _email),
    (_DOMAIN, lambda found: _address(found[1], found[2])),
    (_LANGUAGE, lambda found: _LANGUAGES[found[0]]),
    (_PATH, _path),
    (_FILE, _file),
    (re.compile(r"(?<!\w)\.NET\b"), " dot net "),
    (re.compile(r"(?<![\w.])\.(?=[a-z]{2})"), " dot "),
    (_MARKED, lambda found: f" number {_spelled(found[1])} "),
    (_ACCOUNT, lambda found: f" {_spelled(found[0])} "),
    (_IDENTIFIER, lambda found: f" {_spelled(found[0])} "),
    (_NETWORK, r"\1 slash "),
    (_IP_V6, lambda found: f" {_spelled(found[0])} "),
    (re.compile(r"(?<![\w&])#\s?(?=\d++(?![^\W_]))"), " number "),
    (re.compile(r"(?<![\w&])#(?=[^\W_])"), " hashtag "),
    (re.compile(r"(?<!\w)@(?=\w)"), " at "),
    (re.compile(r"(?<=\s)@(?=\s)"), " at "),
    (re.compile(r"\b[wW]/o\b"), "without"),
    (re.compile(r"\b[wW]/(?=\s|[a-z]{3})"), "with "),
    (re.compile(r"\bb/c\b"), "because"),
    (re.compile(r"\b[nN]/[aA]\b"), "not applicable"),
)


def without_names(text: str) -> str:
    """The text with words for addresses, files, tags and handles."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


_CODE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\(\s*\)|[;{}\[\]\"'`$@\\]|(?<!\w)--?(?=\w)"), " "),
    (re.compile(r"\("), " "),
    (re.compile(r"\)"), " "),
    (re.compile(r"\*\*"), " to the power of "),
    (re.compile(r"(?<=\w) ?\* ?(?=\w)"), " times "),
    (re.compile(r"\+="), " plus equals "),
    (re.compile(r"-="), " minus equals "),
    (re.compile(r"&&"), " and "),
    (re.compile(r"\|\|"), " or "),
    (re.compile(r"[|*#]"), " "),
    (re.compile(r"(?<=[A-Za-z)])\.(?=[A-Za-z_])"), " dot "),
    (re.compile(r"_+"), " "),
    (re.compile(r"(?<=[A-Za-z])-(?=[A-Za-z])"), " "),
    (re.compile(r"(?<=\w)\s?/\s?(?=\D)|(?<!\w)/|::"), " "),
)


def code_words(code: str) -> str:
    """Text that stands for an inline code; empty if the code is long."""
    if len(code) > MAX_CODE:
        return ""
    text = without_names(code)
    for pattern, replacement in _CODE:
        text = pattern.sub(replacement, text)
    return camel_words(text)
