"""README.md and docs/ name only files, modules, flags and links that exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_live"
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    path
    for folder in ("python", "benchmark", "training", "scripts")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh")
]
_FILE = re.compile(r"(?<![\w./$~{-])[\w][\w./-]*\.(?:py|sh|md|svg|txt|html|flac)\b")
_FOLDER = re.compile(r"`([\w.][\w./-]*/)`")
_MODULE = re.compile(r"python -m ((?:sglang_live|benchmark|training)[\w.]*)")
_FLAG = re.compile(r"(?<![\w-])--(?:(?:thinker|talker|vocoder|STAGE)\.)?([a-z][a-z0-9-]+)")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def words(pattern: re.Pattern, path: Path) -> list[str]:
    return sorted(set(pattern.findall(path.read_text())))


def own_flags() -> set[str]:
    """Flags written out in our sources, and fields of dataclasses, from which others are made."""
    text = "\n".join(path.read_text() for path in SOURCES)
    fields = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    return {*re.findall(r"--([a-z][a-z0-9-]+)", text), *(name.replace("_", "-") for name in fields)}


def sglang_flags() -> set[str]:
    """Its source is read, not imported: that takes seconds."""
    spec = importlib.util.find_spec("sglang")
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "arg_groups" / "fields"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    return {name.replace("_", "-") for name in re.findall(r"^    (\w+): A\[", text, re.MULTILINE)}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_file_and_folder_exists(path):
    named = [*words(_FILE, path), *words(_FOLDER, path)]
    places = (ROOT, PACKAGE, path.parent)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path):
    assert [link for link in words(_LINK, path) if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_module_can_be_run(path):
    def is_there(name: str) -> bool:
        place = name.replace(".", "/")
        roots = (ROOT, ROOT / "python")
        return any(
            (r / f"{place}{end}").is_file() for r in roots for end in (".py", "/__main__.py")
        )

    assert [name for name in words(_MODULE, path) if not is_there(name)] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_flag_exists(path):
    known = own_flags() | sglang_flags()
    assert [flag for flag in words(_FLAG, path) if flag not in known] == []
