"""What all adapters need: a session of the Realtime API, and speech."""

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from benchmark.anything_said import Speaker
from sglang_live.client import clip

DELTA = "response.output_audio.delta"
STARTED = "input_audio_buffer.speech_started"
HEARD = "conversation.item.input_audio_transcription.completed"
# The voices of people that the demo model was trained on are of speech synthesisers.
SPEAKER = "espeak-ng:en-us"


class Session:
    """take: is given each event of the server."""

    def __init__(self, url: str, take: Callable[[dict[str, Any]], None]):
        self._url = url.replace("http", "ws", 1).rstrip("/") + "/v1/realtime"
        self._take = take
        self._socket: ClientConnection | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._socket = await connect(self._url, max_size=None, compression=None, proxy=None)
        transcription = {"input": {"transcription": {"model": "gpt-4o-transcribe"}}}
        await self._send("session.update", session={"type": "realtime", "audio": transcription})
        async for text in self._socket:
            if (event := json.loads(text))["type"] == "session.updated":
                break
            if event["type"] == "error":
                raise RuntimeError(f"the server says {event['error']}")
        self._reading = asyncio.create_task(self._read(self._socket))

    async def append(self, pcm: bytes) -> None:
        await self._send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()

    async def _send(self, kind: str, **fields: Any) -> None:
        assert self._socket is not None
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def _read(self, socket: ClientConnection) -> None:
        async for text in socket:
            self._take(json.loads(text))


def sound_of(event: dict[str, Any]) -> bytes:
    """PCM16 at 24 kHz."""
    return base64.b64decode(event["delta"])


def spoken(speaker: Speaker, text: str) -> bytes:
    """PCM16 at 24 kHz, without silence at its end."""
    pcm = speaker(text)
    return pcm[: clip.speech_frames(pcm) * clip.FRAME_BYTES]
