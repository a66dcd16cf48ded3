"""Encodes what users say while the model speaks: frames of sound to frames of codes, in batches.

In: one frame of sound at a time for each job. Out: its codes.
Owner: the vocoder stage, whose thread computes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sglang_live.aio import vital
from sglang_live.errors import BadInputError, CapacityError
from sglang_live.messages import HeardFrame, UserSound
from sglang_live.stages.transport.server import ServedJob
from sglang_live.stages.vocoder.config import VocoderConfig


class StreamEncoder(Protocol):
    """See MimiEncoder in models/codecs/mimi.py."""

    samples_per_frame: int

    def new_stream(self) -> Any: ...

    def encode(self, streams: list[Any], samples: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """samples: [samples_per_frame] float32. codes: [n_quantizers], once they are known."""

    stream: Any
    samples: Tensor
    codes: asyncio.Future[Tensor]


class Hearing:
    def __init__(
        self,
        encoder: StreamEncoder,
        config: VocoderConfig,
        compute: Callable[[Callable[[], Tensor]], Awaitable[Tensor]],
    ):
        """compute: runs work in the stage's thread."""
        self._encoder = encoder
        self._config = config
        self._compute = compute
        self._waiting: list[_Frame] = []
        self._came = asyncio.Event()
        self._n_jobs = 0
        self._counts = {"user_frames": 0.0, "user_batches": 0.0}

    async def start(self) -> None:
        samples = torch.zeros(1, self._encoder.samples_per_frame)
        stream = self._encoder.new_stream()
        await self._compute(lambda: self._encoder.encode([stream], samples))
        self._encoding = vital(self._encode_forever(), "hearing")

    def load(self) -> dict[str, float]:
        return {"users_heard": float(self._n_jobs), **self._counts}

    async def run(self, job: ServedJob) -> None:
        if self._n_jobs >= self._config.max_streams:
            raise CapacityError(f"the vocoder hears {self._n_jobs} users already")
        self._n_jobs += 1
        stream = self._encoder.new_stream()
        try:
            async for message in job.inputs():
                if isinstance(message, UserSound):
                    codes = await self._encoded(stream, message.pcm)
                    await job.send(HeardFrame(job.job_id, codes))
        finally:
            self._n_jobs -= 1

    async def _encoded(self, stream: Any, pcm: bytes) -> bytes:
        n = self._encoder.samples_per_frame
        if len(pcm) != 2 * n:
            raise BadInputError(f"a frame of a user has {n} samples, got {len(pcm) / 2:g}")
        samples = torch.from_numpy(np.frombuffer(pcm, "<i2").astype(np.float32) / 32768)
        found = asyncio.get_running_loop().create_future()
        self._waiting.append(_Frame(stream, samples, found))
        self._came.set()
        codes = await found
        return codes.numpy().astype("<i2").tobytes()

    async def _encode_forever(self) -> None:
        """A job sends its next frame to the encoder when it has the codes of the one before: no
        stream is twice in a batch."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                most = self._config.max_batch
                batch, self._waiting = self._waiting[:most], self._waiting[most:]
                streams = [frame.stream for frame in batch]
                samples = torch.stack([frame.samples for frame in batch])
                codes = await self._compute(lambda: self._encoder.encode(streams, samples).cpu())  # noqa: B023 (it runs before the next batch)
                self._counts["user_frames"] += len(batch)
                self._counts["user_batches"] += 1
                for frame, row in zip(batch, codes, strict=True):
                    if not frame.codes.done():
                        frame.codes.set_result(row[0])
