"""Many endless streams against one server, and what the server says meanwhile."""

import asyncio
import random
import time
from pathlib import Path

import numpy as np

from benchmark.frames.stream import Stream, load_speech
from benchmark.frames.watch import Watch
from benchmark.load.server import ServerProcess


async def run_calls(
    server: ServerProcess,
    *,
    n: int,
    every_s: float,
    lasts_s: float,
    detection: dict,
    model: str,
    clips: Path,
    seed: int,
) -> tuple[list[Stream], float, list[dict]]:
    """n calls that begin every_s after each other, until lasts_s after the first.

    Returns:
        The streams, when it began on time.monotonic, and samples of the server's capacity.
    """
    rng = random.Random(seed)
    speech = load_speech(clips)
    streams = [
        Stream(i, server.url, model, detection, np.roll(speech, -rng.randrange(len(speech))))
        for i in range(n)
    ]
    began_s = time.monotonic()
    watch = Watch(server.port)
    watching = asyncio.create_task(watch.run(began_s))

    async def call(stream: Stream) -> None:
        await asyncio.sleep(stream.number * every_s)
        await stream.run(began_s, lasts_s)

    try:
        await asyncio.gather(*map(call, streams))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return streams, began_s, watch.samples
