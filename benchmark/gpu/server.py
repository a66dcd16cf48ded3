"""The whole server: scripts/demo.sh, one spoken turn through every stage."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmark.gpu.findings import CannotRunError, Findings

ROOT = Path(__file__).parents[2]
CUDA_PACKAGES = ("sglang", "sgl_kernel", "flashinfer")
# Lines that scripts/demo.sh prints after a successful conversation.
_FIGURES = {
    "ttfp_ms": r"TTFP (\d+) ms",
    "end_of_turn_ms": r"end of turn detected after (\d+) ms",
    "reply_s": r"reply ([\d.]+) s",
    "start_s": r"server ready after (\d+) s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    model_path: str = "demo"
    timeout_s: float = 540.0


def run(options: Options, device: str, seed: int) -> Findings:
    _check_environment(device)
    command = ["bash", "scripts/demo.sh", "--model-path", options.model_path]
    command += ["--out", "/dev/null"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=options.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Findings({}, (f"no end within {options.timeout_s:.0f} s",), ())
    if done.returncode:
        output = (done.stdout + done.stderr).strip().splitlines()
        return Findings({}, (f"exit status {done.returncode}",), tuple(output[-40:]))
    figures = figures_of(done.stdout)
    return Findings(figures, (), tuple(f"{name}: {value:g}" for name, value in figures.items()))


def figures_of(output: str) -> dict[str, float]:
    found = {name: re.search(pattern, output) for name, pattern in _FIGURES.items()}
    return {name: float(match[1]) for name, match in found.items() if match}


def _check_environment(device: str) -> None:
    """scripts/demo.sh would install missing packages; a check must not start a download."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        raise CannotRunError("no .venv yet: run scripts/setup.sh first")
    for name in () if device == "cpu" else CUDA_PACKAGES:
        found = subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False)
        if found.returncode:
            raise CannotRunError(f".venv has no {name}: run scripts/setup.sh --device cuda first")
