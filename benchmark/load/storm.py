"""Prefill storms: several users periodically send half a minute of audio at once.

Each sends one long message as a conversation item, faster than real time, and requests a few words
of text. The prefill delays the users who are listening at that time.
"""

import asyncio
import base64
from dataclasses import replace

import numpy as np

from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from sglang_live.client import clip
from sglang_live.client.connection import SessionError
from sglang_live.clock import Clock
from sglang_live.extensions.planner.simulation.load.rows import StormRow
from sglang_live.extensions.planner.simulation.load.storm import MAX_OUTPUT_TOKENS, StormSpec
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord

# A stream of random numbers apart from those of users and arrivals.
_STORM_STREAM = 2**31 + 1


def storm_message(pool: bytes, clip_s: float, rng: np.random.Generator) -> str:
    """`clip_s` of the looped pool from a random position: no two share a prefix."""
    n_bytes = round(clip_s * clip.SAMPLE_RATE_HZ) * clip.BYTES_PER_SAMPLE
    start = int(rng.integers(len(pool) // clip.BYTES_PER_SAMPLE)) * clip.BYTES_PER_SAMPLE
    turned = pool[start:] + pool[:start]
    pcm = (turned * (n_bytes // len(turned) + 1))[:n_bytes]
    # Base64 needs no escaping; json.dumps would check every character of two megabytes.
    audio = base64.b64encode(pcm).decode()
    return (
        '{"type":"conversation.item.create","item":{"type":"message","role":"user",'
        f'"content":[{{"type":"input_audio","audio":"{audio}"}}]}}}}'
    )


class Storm:
    def __init__(
        self,
        spec: StormSpec,
        pool: bytes,
        seed: tuple[int, int],
        options: LoadOptions,
        clock: Clock,
    ):
        self._spec = spec
        self._pool = pool
        self._seed = seed
        # Push-to-talk: these sessions have no open microphone.
        self._options = replace(options, push_to_talk=True, acks=False)
        self._clock = clock
        self._began_s = clock.now_s()
        self._sending: set[asyncio.Task[None]] = set()
        self.rows: list[StormRow] = []

    async def run(self) -> None:
        """Run until cancelled; call `finish` afterwards."""
        for wave in range(1, 2**31):
            due_s = self._began_s + wave * self._spec.period_s
            await self._clock.sleep(due_s - self._clock.now_s())
            for session in range(self._spec.sessions):
                task = asyncio.create_task(self._send(wave, session))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def finish(self) -> None:
        """Wait for the messages under way; each has its own time limit."""
        await asyncio.gather(*self._sending)

    async def _send(self, wave: int, session: int) -> None:
        rng = np.random.default_rng([*self._seed, _STORM_STREAM, wave, session])
        message = storm_message(self._pool, self._spec.clip_s, rng)
        start_s = self._clock.now_s() - self._began_s
        try:
            async with RealtimeClient(self._options, self._clock) as client:
                record = await client.post(message, MAX_OUTPUT_TOKENS)
        except SessionError as error:
            record = TurnRecord(kind="posted", status="refused", error=str(error))
        self.rows.append(StormRow(wave=wave, session=session, start_s=start_s, record=record))
