"""Run a benchmark with clocks at 1/K of real time.

    python -m benchmark.scaled_clock 4 voice_load --sessions 32 --device-model FILE

For this process and all that it starts, a second lasts K real ones (clock.c). Beneath a modelled
device, whose times are of its clock, the machine then computes as if it were K times as fast, so it
carries more users than in real time. Every program in it is unchanged.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmark.scaled_clock import SCALED_CLOCK_ENV

SOURCE = Path(__file__).with_name("clock.c")


def compiled(folder: Path) -> Path:
    """The library for LD_PRELOAD, compiled into this folder."""
    library = folder / "scaled_clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(library), str(SOURCE), "-ldl"], check=True)
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
    with tempfile.TemporaryDirectory() as folder:
        env = environment(int(divisor), compiled(Path(folder)))
        command = [sys.executable, "-m", f"benchmark.{name}", *flags]
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
