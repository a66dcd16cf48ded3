#!/usr/bin/env python3
"""The tables of flags in docs/configuration.md, written anew from the settings.

    python scripts/flag_tables.py

Only the text between a pair of markers changes; the first one names the table.
"""

import re
from dataclasses import MISSING
from pathlib import Path

from sglang_live.flags import server_flags
from sglang_live.launch_stage import OwnFlags
from sglang_live.settings import Flag, flags_of
from sglang_live.stages.vocoder.config import VocoderConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
_REGION = re.compile(r"<!-- flags:begin (\w+) -->\n.*?<!-- flags:end -->", re.DOTALL)


def tables() -> dict[str, str]:
    """By name of their region."""
    return {
        "server": _table(server_flags(), "--"),
        "vocoder": _table({"": flags_of(VocoderConfig)}, "--vocoder."),
        "launch_stage": _table({"": flags_of(OwnFlags)}, "--"),
    }


def filled(page: str) -> str:
    """The page with its tables written anew."""
    made = tables()

    def region(match: re.Match[str]) -> str:
        return f"<!-- flags:begin {match[1]} -->\n{made[match[1]]}\n<!-- flags:end -->"

    return _REGION.sub(region, page)


def _table(flags: dict[str, list[Flag]], prefix: str) -> str:
    """flags: by subject, which has a row of its own if it has a name."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for subject, of_subject in flags.items():
        rows += [f"| **{subject}** | | |"] if subject else []
        rows += [_row(flag, prefix) for flag in of_subject]
    return "\n".join(rows)


def _row(flag: Flag, prefix: str) -> str:
    name = f"{prefix}{flag.name} {flag.shown_value}".strip().replace("|", "\\|")
    return f"| `{name}` | {_default(flag)} | {_meaning(flag)} |"


def _default(flag: Flag) -> str:
    if flag.default is MISSING:
        return "required"
    if flag.kind is bool:
        return "off"
    shown = flag.shown_default or "none"
    is_text = isinstance(flag.default, str) and not flag.unset and flag.default
    return f"`{shown}`" if is_text else _in_code(shown)


def _meaning(flag: Flag) -> str:
    text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", _in_code(flag.help))
    return f"{text}; also in `{flag.env}`" if flag.env else text


def _in_code(text: str) -> str:
    """With the flags that it names as code."""
    return re.sub(r"(?<![\w-])--[a-z][\w.-]*\w", r"`\g<0>`", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
