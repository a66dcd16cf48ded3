"""A modelled device on which one token costs as much as several.

What computes beneath a modelled device must take less time than the device would, and a small model
on a CPU takes about as long for a token of a prompt as a large one on a GPU. So prompts are sent
with a share of their tokens, each of which costs, and holds, as much as all that it stands for.
Tokens of a response cost their round, and hold as much KV as those of a prompt.
"""

import json
import tomllib
from pathlib import Path

_PER_TOKEN = ("decode_per_kv_token_ns", "prefill_per_token_us", "kv_token_bytes")


def coarse_device(path: Path, divisor: int, folder: Path) -> Path:
    """Write the device model to a file in `folder`, with costs of the thinker's tokens times the
    divisor. Returns the file."""
    document = tomllib.loads(path.read_text("utf-8"))
    for name in _PER_TOKEN:
        document["thinker"][name]["value"] *= divisor
    lines = [f"{name} = {json.dumps(document.pop(name))}" for name in ("name", "n_devices")]
    for section, figures in document.items():
        lines.append(f"[{section}]")
        lines += [
            f"{name} = {{ value = {one['value']}, source = {json.dumps(one['source'])} }}"
            for name, one in figures.items()
        ]
    coarse = folder / f"{path.stem}_{divisor}.toml"
    coarse.write_text("\n".join(lines) + "\n", "utf-8")
    return coarse
