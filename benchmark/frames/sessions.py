"""Many endless streams against one server, and samples of its capacity."""

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
    """The same endless speech for each of n streams, each from another position."""
    rng = random.Random(seed)
    speech = load_speech(clips)
    return [np.roll(speech, -rng.randrange(len(speech))) for _ in range(n)]


async def run_sessions(
    server: ServerProcess,
    *,
    sounds: list[np.ndarray],
    every_s: float,
    lasts_s: float,
    detection: dict,
    model: str,
    session_s: float = math.inf,
) -> tuple[list[Stream], float, list[dict]]:
    """Run a session for each sound, every_s after each other, until lasts_s after the first.

    Args:
        session_s: duration of a session.
    Returns:
        The streams, the start on time.monotonic, and samples of the server's capacity.
    """
    streams = [Stream(i, server.url, model, detection, sound) for i, sound in enumerate(sounds)]
    began_s = time.monotonic()
    watch = Watch(server.port)
    watching = asyncio.create_task(watch.run(began_s))

    async def session(stream: Stream) -> None:
        comes_s = stream.number * every_s
        await asyncio.sleep(comes_s)
        await stream.run(began_s, min(lasts_s, comes_s + session_s))

    try:
        await asyncio.gather(*map(session, streams))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return streams, began_s, watch.samples
