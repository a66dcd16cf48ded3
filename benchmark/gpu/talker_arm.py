"""One talker stage process, as the server starts it, and its greedy responses."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_live.message_parts import WireSegment
from sglang_live.messages import CodecFrames, TalkerDone, TalkerInput, TalkerRequest
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Supervisor, loopback_address
from sglang_live.stages.transport.client import StageClient

JOB_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The inputs of every response, and the number of frames that are read."""

    user_ids: list[int]
    response_ids: list[int]
    voice: str
    n_frames: int
    num_code_groups: int


@dataclass(frozen=True, slots=True)
class Arm:
    """The measurements of one arm.

    codes: [n_frames, num_code_groups] of one response.
    ms_per_frame: by number of concurrent responses.
    """

    codes: np.ndarray
    ms_per_frame: dict[int, float]


async def run_arm(
    checkpoint: Path,
    device: str,
    engine_args: dict[str, Any],
    request: Request,
    batches: tuple[int, ...],
    start_timeout_s: float,
) -> Arm:
    async with _stage(checkpoint, device, engine_args, start_timeout_s) as client:
        codes, _ = await _speak(client, request, "first")
        ms_per_frame = {}
        for n_responses in batches:
            responses = await asyncio.gather(
                *(_speak(client, request, f"{n_responses}-{i}") for i in range(n_responses))
            )
            ms_per_frame[n_responses] = float(np.median([ms for _, ms in responses]))
    return Arm(codes, ms_per_frame)


@asynccontextmanager
async def _stage(
    checkpoint: Path, device: str, engine_args: dict[str, Any], start_timeout_s: float
) -> AsyncIterator[StageClient]:
    owned = RunDir.make()
    run_dir = owned.path
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
        engine_args=engine_args,
    )
    supervisor = Supervisor([spec], log_dir=run_dir)
    try:
        with _gpus_hidden(device == "cpu"):
            async with asyncio.timeout(start_timeout_s):
                await supervisor.start()
        yield supervisor.replicas[0].client
    except Exception:
        log = (run_dir / "talker-0.log").read_text(errors="replace").splitlines()
        print("\n".join(log[-LOG_TAIL_LINES:]), file=sys.stderr)
        raise
    finally:
        await supervisor.stop()
        owned.remove()


async def _speak(client: StageClient, request: Request, name: str) -> tuple[np.ndarray, float]:
    """A response's first frames [n_frames, num_code_groups], and ms per frame after the first."""
    first_id, *later_ids = request.response_ids
    frames: list[np.ndarray] = []
    arrivals_s: list[float] = []
    async with client.open(name) as job:
        await job.send(
            TalkerRequest(
                name,
                session_id="",
                segment_keys=["user"],
                segments=[WireSegment("user", request.user_ids)],
                voice=request.voice,
                first_id=first_id,
                temperature=0.0,
                seed=0,
                timeout_s=JOB_TIMEOUT_S,
            )
        )
        await job.send(TalkerInput(name, later_ids, done=True))
        async with aclosing(job.events(TalkerDone)) as events:
            async for message, _ in events:
                if isinstance(message, CodecFrames):
                    new = np.frombuffer(message.codes, "<i2")
                    frames.extend(new.reshape(-1, request.num_code_groups))
                    arrivals_s += [time.perf_counter()] * (len(frames) - len(arrivals_s))
                if len(frames) >= request.n_frames:
                    break
    if len(frames) < request.n_frames:
        raise RuntimeError(
            f"response {name} ended after {len(frames)} of {request.n_frames} frames"
        )
    span_s = arrivals_s[request.n_frames - 1] - arrivals_s[0]
    return np.stack(frames[: request.n_frames]), 1e3 * span_s / (request.n_frames - 1)


@contextmanager
def _gpus_hidden(hide: bool) -> Iterator[None]:
    """Hide GPUs from processes that are started within the context."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if hide:
        os.environ[name] = ""
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif hide:
            del os.environ[name]
