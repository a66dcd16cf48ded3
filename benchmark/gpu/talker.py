"""The talker in its SGLang engine: greedy frames on the device against the CPU, and their pace.

The demo architecture with replies that do not end by themselves. Each arm is a stage process of
its own, as the server starts it.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.gpu.findings import CannotRunError, Findings
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from sglang_live.models.qwen3_omni.spec import FRAME_RATE_HZ, Qwen3OmniSpec
from sglang_live.orchestrator.history import HistoryItem, TurnRequest
from sglang_live.orchestrator.links import TalkerLink
from sglang_live.orchestrator.stage_jobs import Segment
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Replica, Supervisor, loopback_address, new_run_dir

KEY = "user-0"
LOG_TAIL_LINES = 5
# SGLang's default backends on CUDA take half precision only.
EXACT_ARGS = {
    "dtype": "float32",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_total_tokens": 16_384,
}
SERVED_ARGS = {"dtype": "bfloat16", "max_total_tokens": 16_384}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """compared_frames: per reply. batches: replies at once while the pace is measured."""

    compared_frames: int = 32
    text_tokens: int = 12
    batches: tuple[int, ...] = (1, 8)
    start_timeout_s: float = 240.0


def run(options: Options, device: str, seed: int) -> Findings:
    _check_packages(device)
    with tempfile.TemporaryDirectory() as scratch:
        arms = asyncio.run(_run_arms(options, device, seed, Path(scratch)))
    expected, exact, served = arms["cpu"], arms["float32"], arms.get("bfloat16")
    share = equal_share(exact.codes, expected.codes)
    figures: dict[str, Any] = {
        "float32_frames_equal": share,
        "bfloat16_frames_equal": served and equal_share(served.codes, expected.codes),
        "pace": {name: arm.pace for name, arm in arms.items()},
    }
    problems = () if share == 1.0 else (f"{1 - share:.2%} of the float32 frames differ",)
    return Findings(figures, problems, tuple(_lines(figures)))


def equal_share(codes: np.ndarray, expected: np.ndarray) -> float:
    """Share of frames with all codes equal. codes: [n_frames, n_groups]."""
    return float((codes == expected).all(axis=1).mean())


@dataclass(frozen=True, slots=True)
class Arm:
    """codes: [n_frames, n_groups] of one reply. pace: ms per frame by replies at once."""

    codes: np.ndarray
    pace: dict[int, float]


def _check_packages(device: str) -> None:
    names = ["sglang"] if device == "cpu" else ["sglang", "sgl_kernel"]
    for name in names:
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            error = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CannotRunError(f"{name} does not import: {error}")


async def _run_arms(
    options: Options, device: str, seed: int, scratch: Path
) -> dict[str, Arm]:
    checkpoint = scratch / "model"
    checkpoint.mkdir()
    build(checkpoint, DemoSize(talker_end_logit=0.0))
    spoken = _turn(Qwen3OmniSpec.load(checkpoint), options, seed)
    with _without_gpus():
        arms = {"cpu": await _run_arm("cpu", {}, spoken, checkpoint, options)}
    if device == "cpu":
        return arms | {"float32": await _run_arm("cpu", {}, spoken, checkpoint, options)}
    for name, args in (("float32", EXACT_ARGS), ("bfloat16", SERVED_ARGS)):
        arms[name] = await _run_arm(device, args, spoken, checkpoint, options)
    return arms


def _turn(model: Qwen3OmniSpec, options: Options, seed: int) -> "Spoken":
    words = np.random.default_rng(seed).integers(100, 1000, 8 + options.text_tokens).tolist()
    user = [model.im_start_id, model.user_id, *words[:8]]
    return Spoken(Segment(user, None), words[8:], model.voices[0])


@dataclass(frozen=True, slots=True)
class Spoken:
    """What every reply answers, and its text."""

    user: Segment
    reply_ids: list[int]
    voice: str

    def turn(self, number: int) -> TurnRequest:
        user = HistoryItem(key=KEY, role="user", parts=())
        return TurnRequest(
            turn_id=f"turn-{number:06d}",
            instructions="",
            history=(user,),
            voice=self.voice,
            temperature=0.0,
        )


async def _run_arm(
    device: str, args: dict[str, Any], spoken: Spoken, checkpoint: Path, options: Options
) -> Arm:
    async with _stage(device, args, checkpoint, options.start_timeout_s) as replica:
        frames, _ = await _speak(replica, spoken, 0, options.compared_frames)
        pace = {}
        for n_replies in options.batches:
            times = await asyncio.gather(
                *(
                    _speak(replica, spoken, 1000 * n_replies + i, options.compared_frames)
                    for i in range(n_replies)
                )
            )
            pace[n_replies] = float(np.median([ms for _, ms in times]))
    return Arm(frames, pace)


@asynccontextmanager
async def _stage(
    device: str, args: dict[str, Any], checkpoint: Path, timeout_s: float
) -> AsyncIterator[Replica]:
    run_dir = new_run_dir()
    spec = StageSpec(
        stage="talker",
        replica=0,
        model_path=str(checkpoint),
        cache_dir=str(checkpoint.parent),
        address=loopback_address(run_dir, "talker", 0),
        same_host=True,
        run_dir=str(run_dir),
        served_name="demo",
        device=device,
        engine_args=args,
    )
    supervisor = Supervisor([spec], log_dir=run_dir)
    try:
        async with asyncio.timeout(timeout_s):
            await supervisor.start()
        yield supervisor.replicas[0]
    except Exception:
        log = (run_dir / "talker-0.log").read_text(errors="replace").splitlines()
        print("\n".join(log[-LOG_TAIL_LINES:]), file=sys.stderr)
        raise
    finally:
        await supervisor.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


async def _speak(
    replica: Replica, spoken: Spoken, number: int, n_frames: int
) -> tuple[np.ndarray, float]:
    """Codes of the first frames of a reply, and ms per frame between the first and the last."""
    link = TalkerLink(replica, f"session-{number}", {KEY: spoken.user})
    frames: list[np.ndarray] = []
    first_s = last_s = 0.0
    async with link.open(spoken.turn(number)) as speech:
        await speech.write(spoken.reply_ids)
        await speech.end_text()
        async with aclosing(speech.frames()) as chunks:
            async for codes in chunks:
                n_groups = 16
                frames.extend(np.frombuffer(codes, "<i2").reshape(-1, n_groups))
                last_s = time.perf_counter()
                first_s = first_s or last_s
                if len(frames) >= n_frames:
                    break
    link.close()
    return np.stack(frames[:n_frames]), 1e3 * (last_s - first_s) / max(1, len(frames) - 1)


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Processes started meanwhile see no GPU; this one keeps those that it has."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _lines(figures: dict[str, Any]) -> list[str]:
    lines = []
    for dtype in ("float32", "bfloat16"):
        share = figures[f"{dtype}_frames_equal"]
        if share is not None:
            lines.append(f"{dtype} frames equal to the CPU's: {share:.2%}")
    budget_ms = 1e3 / FRAME_RATE_HZ
    for arm, pace in figures["pace"].items():
        for n_replies, ms in pace.items():
            lines.append(f"{arm}: {n_replies} replies, {ms:.2f} ms per frame of {budget_ms:.0f} ms")
    return lines
