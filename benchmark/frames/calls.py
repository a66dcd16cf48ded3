"""Many endless streams against one server, and what the server says meanwhile."""

import asyncio
import math
import random
import time
from pathlib import Path

import numpy as np

from benchmark.frames.stream import Stream, load_speech
from benchmark.frames.watch import Watch
from benchmark.load.server import ServerProcess


def voices(clips: Path, n: int, seed: int) -> list[np.ndarray]:
    """The same endless speech for each of n streams, from a place of its own."""
    rng = random.Random(seed)
    speech = load_speech(clips)
    return [np.roll(speech, -rng.randrange(len(speech))) for _ in range(n)]


async def run_calls(
    server: ServerProcess,
    *,
    sounds: list[np.ndarray],
    every_s: float,
    lasts_s: float,
    detection: dict,
    model: str,
    call_s: float = math.inf,
) -> tuple[list[Stream], float, list[dict]]:
    """A call for each sound, every_s after each other, until lasts_s after the first.

    call_s: after so long its caller hangs up.

    Returns:
        The streams, when it began on time.monotonic, and samples of the server's capacity.
    """
    streams = [Stream(i, server.url, model, detection, sound) for i, sound in enumerate(sounds)]
    began_s = time.monotonic()
    watch = Watch(server.port)
    watching = asyncio.create_task(watch.run(began_s))

    async def call(stream: Stream) -> None:
        comes_s = stream.number * every_s
        await asyncio.sleep(comes_s)
        await stream.run(began_s, min(lasts_s, comes_s + call_s))

    try:
        await asyncio.gather(*map(call, streams))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return streams, began_s, watch.samples
