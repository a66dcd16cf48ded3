"""Run a benchmark with clocks at 1/K of real time.

    python -m benchmark.scaled_clock 4 voice_load --sessions 32 --device-model FILE

For this process and all that it starts, a second lasts K real ones (clock.c). Beneath a modelled
device, whose times are of its clock, the machine then computes as if it were K times as fast, so it
carries more users than in real time. Every program in it is unchanged.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmark.scaled_clock import SCALED_CLOCK_ENV
from sglang_live.environment import cache_directory

SOURCE = Path(__file__).with_name("clock.c")


def compiled(folder: Path) -> Path:
    """The library for LD_PRELOAD in this folder, compiled if it is not there."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / f"scaled_clock-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        command = ["cc", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*command, "-o", str(new), str(SOURCE), "-ldl"], check=True)
        new.replace(library)
    return library


def environment(divisor: int, library: Path) -> dict[str, str]:
    """Variables under which a program's clocks are scaled, beginning now."""
    preloaded = [str(library), *os.environ.get("LD_PRELOAD", "").split()]
    scale = f"{divisor}:{time.time_ns()}"
    return {**os.environ, "LD_PRELOAD": " ".join(preloaded), SCALED_CLOCK_ENV: scale}


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        print("usage: python -m benchmark.scaled_clock K BENCHMARK [FLAG ...]", file=sys.stderr)
        return 2
    divisor, name, *flags = arguments
    env = environment(int(divisor), compiled(cache_directory()))
    os.execve(sys.executable, [sys.executable, "-m", f"benchmark.{name}", *flags], env)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
