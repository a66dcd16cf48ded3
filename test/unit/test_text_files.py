"""Text of files and programs is UTF-8 by name, whatever the locale says."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of what runs at a user's; tests run where their set-up was made.
PLACES = (
    "python",
    "sgl_patches",
    "kernels",
    "scripts",
    "benchmark",
    "lab",
    "training",
    "setup.py",
    "docs",
)
FILES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", *PLACES], cwd=ROOT, capture_output=True, encoding="utf-8"
    ).stdout.splitlines()
    if name.endswith(".py")
)
# Where the encoding stands if no keyword names it.
_POSITION = {"read_text": 0, "write_text": 1, "TextIOWrapper": 1}
_MODE = re.compile(r"[rwxa]\+?t?\+?")
_IS_TEXT = {"read_text", "write_text", "FileHandler", "TextIOWrapper"}
_MAYBE = re.compile(r"(_text|open|File|Wrapper)\(|text=|newlines=")
_TAKES_MODE = {"open", "fdopen", "NamedTemporaryFile", "TemporaryFile"}


def _is_text(call: ast.Call, function: str) -> bool:
    """Whether it reads or writes text. An `open` of other things than files has no such mode."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    if function in _IS_TEXT:
        return len(call.args) <= _POSITION.get(function, 0)
    if function in _TAKES_MODE:
        modes = [v.value for v in values if isinstance(v, ast.Constant) and type(v.value) is str]
        is_builtin = isinstance(call.func, ast.Name) and len(values) == 1
        return is_builtin or any(map(_MODE.fullmatch, modes))
    return any(
        keyword.arg in ("text", "universal_newlines") and getattr(keyword.value, "value", 1) is True
        for keyword in call.keywords
    )


def without_encoding(text: str) -> Iterator[ast.Call]:
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        function = getattr(call.func, "attr", getattr(call.func, "id", ""))
        named = any(keyword.arg in ("encoding", None) for keyword in call.keywords)
        if not named and _is_text(call, function):
            yield call


def test_text_of_files_and_programs_is_utf_8_by_name():
    texts = {path: path.read_text("utf-8") for path in FILES}
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, text in texts.items()
        if _MAYBE.search(text)
        for call in without_encoding(text)
    ]
    assert texts and found == []
