"""The talker in its SGLang engine: greedy frames on the device against the CPU, and their pace.

The demo architecture, with responses that never end by themselves.
"""

import asyncio
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.gpu.findings import CannotRunError, Findings
from benchmark.gpu.talker_arm import Arm, Request, run_arm
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from sglang_live.models.qwen3_omni.spec import FRAME_RATE_HZ, Qwen3OmniSpec

_POOL = {"max_total_tokens": 16_384}
# SGLang's default attention backends on CUDA take half precision only.
_EXACT = {"dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True}
_SERVED = {"dtype": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Extent of the check.

    frames: frames compared per response.
    batches: numbers of concurrent responses for the pace.
    """

    frames: int = 32
    text_tokens: int = 12
    batches: tuple[int, ...] = (1, 8)
    start_timeout_s: float = 240.0


def run(options: Options, device: str, seed: int) -> Findings:
    _check_packages(device)
    with tempfile.TemporaryDirectory() as scratch:
        arms = asyncio.run(_run_arms(options, device, seed, Path(scratch)))
    expected = arms.pop("cpu")
    equal = {name: equal_share(arm.codes, expected.codes) for name, arm in arms.items()}
    figures = {
        "frames_equal_to_cpu_float32": equal,
        "ms_per_frame": {name: arm.ms_per_frame for name, arm in arms.items()},
    }
    exact = equal["float32"]
    problems = () if exact == 1.0 else (f"{1 - exact:.2%} of the float32 frames differ",)
    return Findings(figures, problems, tuple(_lines(figures)))


def equal_share(codes: np.ndarray, expected: np.ndarray) -> float:
    """Share of frames with all codes equal. codes: [n_frames, num_code_groups]."""
    return float((codes == expected).all(axis=1).mean())


def _check_packages(device: str) -> None:
    """Check imports in another process: importing SGLang has side effects on this one."""
    for name in ("sglang",) if device == "cpu" else ("sglang", "sgl_kernel"):
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            error = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CannotRunError(f"{name} does not import: {error}")


async def _run_arms(options: Options, device: str, seed: int, scratch: Path) -> dict[str, Arm]:
    checkpoint = scratch / "model"
    checkpoint.mkdir()
    build(checkpoint, DemoSize(talker_end_logit=0.0))
    request = _request(Qwen3OmniSpec.load(checkpoint), options, seed)
    on_cpu = ("cpu", _POOL)
    places = {
        "cpu": on_cpu,
        "float32": (device, _POOL | _EXACT),
        "bfloat16": (device, _POOL | _SERVED),
    }
    if device == "cpu":
        places = {"cpu": on_cpu, "float32": on_cpu}
    return {
        name: await run_arm(
            checkpoint, place, args, request, options.batches, options.start_timeout_s
        )
        for name, (place, args) in places.items()
    }


def _request(model: Qwen3OmniSpec, options: Options, seed: int) -> Request:
    words = np.random.default_rng(seed).integers(100, 1000, 8 + options.text_tokens).tolist()
    return Request(
        user_ids=[model.im_start_id, model.user_id, *words[:8]],
        response_ids=words[8:],
        voice=model.voices[0],
        n_frames=options.frames,
        num_code_groups=model.num_code_groups,
    )


def _lines(figures: dict[str, Any]) -> list[str]:
    lines = [
        f"{name} frames equal to the CPU's: {share:.2%}"
        for name, share in figures["frames_equal_to_cpu_float32"].items()
    ]
    budget_ms = 1e3 / FRAME_RATE_HZ
    for name, pace in figures["ms_per_frame"].items():
        for n_responses, ms in pace.items():
            lines.append(
                f"{name}, {n_responses} responses: {ms:.2f} of {budget_ms:.0f} ms per frame"
            )
    return lines
