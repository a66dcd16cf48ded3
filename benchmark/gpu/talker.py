"""The talker in its SGLang engine: greedy frames on the device against the CPU, and their pace.

The demo architecture, with responses that never end by themselves. In bf16 also with decode
graphs against eager.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.gpu.arms import arms_on, compare, lines_of
from benchmark.gpu.findings import Findings
from benchmark.gpu.places import platform_of
from benchmark.gpu.talker_arm import Arm, Request, run_arm
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from sglang_live.models.qwen3_omni.family import FRAME_RATE_HZ, Qwen3OmniSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Extent of the check.

    frames: frames compared per response.
    batches: numbers of concurrent responses for the pace.
    """

    frames: int = 32
    text_tokens: int = 12
    batches: tuple[int, ...] = (1, 8)
    start_timeout_s: float = 100.0


TINY = Options(frames=8, batches=(2,))


def run(options: Options, device: str, seed: int) -> Findings:
    platform = platform_of(device)
    with tempfile.TemporaryDirectory() as scratch:
        arms = asyncio.run(_run_arms(options, device, seed, Path(scratch)))
    figures, problems = compare({name: arm.codes for name, arm in arms.items()}, "frames")
    figures |= {
        "platform": platform,
        "ms_per_frame": {name: arm.ms_per_frame for name, arm in arms.items() if name != "cpu"},
    }
    return Findings(figures, tuple(problems), tuple(_lines(figures)))


async def _run_arms(options: Options, device: str, seed: int, scratch: Path) -> dict[str, Arm]:
    checkpoint = scratch / "model"
    checkpoint.mkdir()
    build(checkpoint, DemoSize(talker_end_logit=0.0))
    request = _request(Qwen3OmniSpec.load(checkpoint), options, seed)
    return {
        name: await run_arm(
            checkpoint, place, args, request, options.batches, options.start_timeout_s
        )
        for name, (place, args) in arms_on(device).items()
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
    lines = lines_of(figures, "frames")
    budget_ms = 1e3 / FRAME_RATE_HZ
    for name, pace in figures["ms_per_frame"].items():
        for n_responses, ms in pace.items():
            lines.append(
                f"{name}, {n_responses} responses: {ms:.2f} of {budget_ms:.0f} ms per frame"
            )
    return lines
