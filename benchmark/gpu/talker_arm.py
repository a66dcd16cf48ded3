"""One talker stage process, as the server starts it, and its greedy responses."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.gpu.stage import running_stage
from sglang_live.messages import CodecFrames, TalkerDone, TalkerInput, TalkerRequest, WireSegment
from sglang_live.stages.transport.client import StageClient

JOB_TIMEOUT_S = 60.0


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
    async with running_stage("talker", checkpoint, device, engine_args, start_timeout_s) as replica:
        client = replica.client
        codes, _ = await speak(client, request, "first")
        ms_per_frame = {}
        for n_responses in batches:
            responses = await asyncio.gather(
                *(speak(client, request, f"{n_responses}-{i}") for i in range(n_responses))
            )
            ms_per_frame[n_responses] = float(np.median([ms for _, ms in responses]))
    return Arm(codes, ms_per_frame)


async def speak(client: StageClient, request: Request, name: str) -> tuple[np.ndarray, float]:
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
