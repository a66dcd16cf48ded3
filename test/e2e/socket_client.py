"""A minimal Realtime client for tests: sends events, collects and checks those of the server."""

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import soundfile as sf
import soxr
import websockets

from test.e2e.conftest import DATA
from test.protocol import ServerEvents

TURN_TIMEOUT_S = 60


class Socket:
    def __init__(self, connection):
        self.connection = connection
        self.events: list[dict] = []
        self._seen = ServerEvents()

    async def send(self, kind: str, **fields) -> None:
        await self.connection.send(json.dumps({"type": kind, **fields}))

    async def append(self, pcm_24k: np.ndarray, step: int = 24_000) -> None:
        """Send int16 audio at once, in several messages."""
        for at in range(0, len(pcm_24k), step):
            audio = base64.b64encode(pcm_24k[at : at + step].tobytes()).decode()
            await self.send("input_audio_buffer.append", audio=audio)

    async def speak(self, pcm_24k: np.ndarray, step: int = 480) -> None:
        """Send int16 audio in real time, like a microphone."""
        began_s = time.monotonic()
        for at in range(0, len(pcm_24k), step):
            await asyncio.sleep(began_s + at / 24_000 - time.monotonic())
            await self.append(pcm_24k[at : at + step])

    async def until(self, *kinds: str, timeout_s: float = TURN_TIMEOUT_S) -> dict:
        """The next event of one of these types; all events are kept in `events`."""
        n_before = len(self.events)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    event = json.loads(await self.connection.recv())
                    self._seen.see(event)
                    self.events.append(event)
                    if event["type"] in kinds:
                        return event
        except TimeoutError:
            came = Counter(event["type"] for event in self.events[n_before:])
            raise TimeoutError(f"no {kinds} in {timeout_s} s, but {dict(came)}") from None

    async def until_all(self, *kinds: str) -> None:
        """Wait for one event of each of these types, in any order."""
        missing = set(kinds)
        while missing:
            missing.discard((await self.until(*missing))["type"])

    async def session(self, **session) -> dict:
        await self.send("session.update", session={"type": "realtime", **session})
        return await self.until("session.updated", "error")

    async def ask(self, text: str, **response) -> dict:
        """Run one text turn. Returns its response.done."""
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
        await self.send("conversation.item.create", item=item)
        await self.send("response.create", response=response)
        return await self.until("response.done")

    async def say(self, pcm_24k: np.ndarray, **response) -> dict:
        """Run one push-to-talk turn. Returns its response.done. Turn detection must be off."""
        await self.append(pcm_24k)
        await self.send("input_audio_buffer.commit")
        await self.send("response.create", response=response)
        return await self.until("response.done")

    def audio_bytes(self) -> bytes:
        """All received audio, in the session's output format."""
        parts = [e["delta"] for e in self.events if e["type"] == "response.output_audio.delta"]
        return b"".join(map(base64.b64decode, parts))

    def audio(self) -> np.ndarray:
        """All received audio as int16, for PCM sessions."""
        return np.frombuffer(self.audio_bytes(), dtype="<i2")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Socket]:
    async with websockets.connect(url, max_size=None, proxy=None) as connection:
        socket = Socket(connection)
        await socket.until("session.created")
        yield socket


def is_whole(done: dict) -> bool:
    """Whether a response.done is of a response that ended by itself or at its limit.

    With random weights a response does not always end by itself.
    """
    response = done["response"]
    at_limit = {"type": "incomplete", "reason": "max_output_tokens"}
    return response["status"] == "completed" or response["status_details"] == at_limit


NO_VAD = {"audio": {"input": {"turn_detection": None}}}


def clip_24k(name: str, seconds: float | None = None) -> np.ndarray:
    pcm, rate_hz = sf.read(DATA / name, dtype="float32")
    pcm = soxr.resample(pcm, rate_hz, 24_000)
    n = None if seconds is None else int(24_000 * seconds)
    return (pcm[:n] * 32767).astype("<i2")
