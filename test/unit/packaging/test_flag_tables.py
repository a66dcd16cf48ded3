"""Claims about scripts/flag_tables.py and the tables that it makes."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_live.settings import Positive, Settings, flag, flags_of

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("flag_tables", ROOT / "scripts" / "flag_tables.py")
flag_tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(flag_tables)


def test_the_committed_tables_are_those_of_the_settings():
    page = flag_tables.PAGE.read_text("utf-8")
    assert flag_tables.filled(page) == page, "run scripts/flag_tables.py"
    regions = re.findall(r"<!-- flags:begin (.+) -->", page)
    assert sorted(regions) == sorted(flag_tables.tables())


def test_a_row_has_what_the_field_says():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Drawn(Settings):
        wait_s: Positive | None = flag(None, "time before --fast ends (docs/kv.md)", env="WAIT")
        kind: Literal["own", "int8"] = flag("own", "of weights")
        fast: bool = flag(False, "without waiting")

    assert flag_tables._table({"drawn": flags_of(Drawn)}, "--").splitlines()[2:] == [
        "| **drawn** | | |",
        "| `--wait-s S` | none | time before `--fast` ends ([kv.md](kv.md)); also in `WAIT` |",
        r"| `--kind own\|int8` | `own` | of weights |",
        "| `--fast` | off | without waiting |",
    ]
