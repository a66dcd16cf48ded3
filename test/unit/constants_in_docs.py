"""Tables under "Constants" headings of docs/: a constant's name in code, and its value."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \|", re.MULTILINE)


def constants_of(doc: str) -> dict[str, str]:
    """Values as they are written, by name."""
    text = (DOCS / doc).read_text()
    rows = [
        row
        for part in re.split(r"^## Constants$", text, flags=re.MULTILINE)[1:]
        for row in _ROW.findall(part.partition("\n## ")[0])
    ]
    assert len(dict(rows)) == len(rows), "a constant is named twice"
    return {name: value.strip() for name, value in rows}


def written(*values: object) -> Iterator[tuple[str, str]]:
    """Fields of configs, and single (name, value) pairs, in the form of the tables."""
    for value in values:
        pairs = (
            [value]
            if isinstance(value, tuple)
            else [(f.name, getattr(value, f.name)) for f in fields(value)]
        )
        for name, number in pairs:
            yield name, f"{number:g}" if isinstance(number, float) else str(number)
