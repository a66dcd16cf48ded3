"""The commands in a document's code blocks, as a shell passes them to `python -m`."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# PATH is empty and this function replaces python, so other commands in a block do nothing.
_PYTHON = r"""
python() {
    local line
    printf -v line '%s\037' "$SGLANG_LIVE_API_KEYS" "$@"
    printf '%s\n' "$line"
}
"""


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    api_keys: SGLANG_LIVE_API_KEYS of its block; empty if not set.
    """

    module: str
    argv: list[str]
    api_keys: str


def blocks_of(text: str) -> list[str]:
    """Code blocks without a language, which are commands for a terminal."""
    return [block for language, block in _BLOCK.findall(text) if not language]


def commands_of(block: str, folder: Path) -> list[Command]:
    """Run a block in bash and return its `python -m` commands.

    folder: an empty folder to run the block in.
    """
    done = subprocess.run(
        ["/bin/bash", "-c", f"{_PYTHON}\n{block}\nwait"],
        cwd=folder,
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    commands = []
    for line in done.stdout.splitlines():
        api_keys, *words = line.split("\037")[:-1]
        if words[:1] == ["-m"]:
            commands.append(Command(words[1], words[2:], api_keys))
    return commands
