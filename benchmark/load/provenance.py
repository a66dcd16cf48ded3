"""Provenance of a result: commit, versions, device, date."""

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmark.scaled_clock import clock_divisor
from sglang_live.extensions.planner.device_model.model import load_device_model

ROOT = Path(__file__).parents[2]


def facts(device_model: Path | None = None) -> dict[str, Any]:
    """device_model: file of the model of the device that was used; None: the machine itself."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "git_dirty": bool(_output("git", "-C", str(ROOT), "status", "--porcelain")),
        "sglang_version": _version("sglang"),
        "torch_version": _version("torch"),
        "python_version": platform.python_version(),
        "device": _device(),
    }
    if device_model is not None:
        model = load_device_model(device_model)
        found["device"] = f"modelled: {model.name}; computed on {found['device']}"
        found["device_model"] = model.facts()
    if clock_divisor() > 1:
        found["device"] += f", clocks at 1/{clock_divisor()} of real time"
        found["clock_divisor"] = clock_divisor()
    return found


def config_of(options) -> dict[str, Any]:
    """A dataclass of flags without the path of the result; paths relative to the checkout."""
    own = f"{ROOT}/"
    values = {name: value for name, value in asdict(options).items() if name != "json"}
    return {n: v.removeprefix(own) if isinstance(v, str) else v for n, v in values.items()}


def _device() -> str:
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if gpus:
        return "cuda: " + ", ".join(gpus.splitlines())
    return f"cpu: {_cpu_model()}, {len(os.sched_getaffinity(0))} cores"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
