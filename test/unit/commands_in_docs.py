"""The commands in a document's code blocks, as a shell hands them to `python -m`."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# The shell has nothing but its own words and this, so what else stands in a block does nothing.
_PYTHON = r"""
python() {
    local line
    printf -v line '%s\037' "$SGLANG_LIVE_API_KEYS" "$CUDA_VISIBLE_DEVICES" "$@"
    printf '%s\n' "$line"
}
"""


@dataclass(frozen=True, slots=True)
class Command:
    """
    api_keys: SGLANG_LIVE_API_KEYS of its block, empty where that is not set.
    gpus: CUDA_VISIBLE_DEVICES of the command, empty where all are.
    """

    module: str
    argv: list[str]
    api_keys: str
    gpus: str


def blocks_of(text: str) -> list[str]:
    """Those without a language: what is typed into a terminal."""
    return [block for language, block in _BLOCK.findall(text) if not language]


def commands_of(block: str, folder: Path) -> list[Command]:
    """folder: an empty one to run the block in; variables, loops and jobs are the shell's."""
    done = subprocess.run(
        ["/bin/bash", "-c", f"{_PYTHON}\n{block}\nwait"],
        cwd=folder,
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    commands = []
    for line in done.stdout.splitlines():
        api_keys, gpus, *words = line.split("\037")[:-1]
        if words[:1] == ["-m"]:
            commands.append(Command(words[1], words[2:], api_keys, gpus))
    return commands
