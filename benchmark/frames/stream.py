"""One endless stream: speech sent at real-time pace, with a result per frame."""

import asyncio
import base64
import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from sglang_live.client import clip

# 40 ms in a message: as many samples as two of WebRTC's packets.
_PACKET_S = 0.040
_PACKET = round(clip.SAMPLE_RATE_HZ * _PACKET_S)


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One frame.

    due_s: time at which its last sample was sent, since the start of the run.
    age_s: age of its session at that time.
    latency_ms: from that time to its result at the client; None if there was none.
    """

    session: int
    index: int
    due_s: float
    age_s: float
    latency_ms: float | None
    outcome: str


def load_speech(folder: Path) -> np.ndarray:
    """[n] int16 at 24 kHz: all clips concatenated."""
    clips = [clip.load_pcm(path) for path in sorted(folder.glob("*.flac"))]
    return np.frombuffer(b"".join(clips), "<i2")


class Stream:
    """One session in frame mode.

    Args:
        sound: [n] int16 at 24 kHz, looped.
        began_s: start of the run, on time.monotonic.

    rows: frames with a result.
    refused: whether the server refused the session.
    """

    def __init__(self, number: int, url: str, model: str, detection: dict, sound: np.ndarray):
        self.number, self.rows, self.refused = number, [], False
        self.ended_early = ""
        self._url, self._model, self._detection = url, model, detection
        self._sound = sound
        self._sent_s: list[float] = []  # send time of the packet with this number
        self._answered = 0  # audio of frames with a result, in ms

    async def run(self, began_s: float, until_s: float) -> None:
        """Run until `until_s` seconds after the start of the run, or until the server ends it."""
        url = f"{self._url}?model={self._model}"
        async with connect(url, max_size=None, compression=None) as socket:
            if not await self._configure(socket):
                return
            reading = asyncio.create_task(self._read(socket, began_s))
            try:
                await self._speak(socket, began_s, until_s)
            except ConnectionClosed as closed:
                self.ended_early = f"{closed.rcvd.code if closed.rcvd else 'lost'}"
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def unanswered(self, began_s: float) -> list[FrameRow]:
        """One row per sent frame without a result."""
        frame_ms = self._detection["frame_ms"]
        rows, at_ms = [], self._answered + frame_ms
        while (packet := self._packet_at(at_ms)) is not None:
            due_s = self._sent_s[packet] - began_s
            age_s = self._sent_s[packet] - self._sent_s[0]
            rows.append(FrameRow(self.number, -1, due_s, age_s, None, "unanswered"))
            at_ms += frame_ms
        return rows

    async def _configure(self, socket: ClientConnection) -> bool:
        """Configure the session. Returns False if the server refuses it.

        A refusal is an error event, followed by a close.
        """
        settings = {"type": "realtime", "audio": {"input": {"turn_detection": self._detection}}}
        with contextlib.suppress(ConnectionClosed):
            await socket.send(json.dumps({"type": "session.update", "session": settings}))
            async for message in socket:
                kind = json.loads(message)["type"]
                if kind == "session.updated":
                    return True
                if kind == "error":
                    break
        self.refused = True
        return False

    async def _speak(self, socket: ClientConnection, began_s: float, until_s: float) -> None:
        at, next_s = 0, time.monotonic()
        while next_s - began_s < until_s:
            packet = np.take(self._sound, range(at, at + _PACKET), mode="wrap")
            at = (at + _PACKET) % len(self._sound)
            audio = base64.b64encode(packet.tobytes()).decode()
            await socket.send(f'{{"type":"input_audio_buffer.append","audio":"{audio}"}}')
            self._sent_s.append(time.monotonic())
            next_s += _PACKET_S
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _read(self, socket: ClientConnection, began_s: float) -> None:
        async for message in socket:
            event = json.loads(message)
            if event["type"] != "frame.done":
                continue
            now_s = time.monotonic()
            self._answered = max(self._answered, event["audio_end_ms"])
            packet = self._packet_at(event["audio_end_ms"])
            sent_s = self._sent_s[-1 if packet is None else packet]
            heard = event["outcome"] in ("on_time", "late")
            self.rows.append(
                FrameRow(
                    self.number,
                    event["frame_index"],
                    sent_s - began_s,
                    sent_s - self._sent_s[0],
                    1000 * (now_s - sent_s) if heard else None,
                    event["outcome"],
                )
            )

    def _packet_at(self, at_ms: float) -> int | None:
        """The packet that contains this position of the audio, or None if it is not sent yet."""
        n = int(np.ceil(at_ms / (1000 * _PACKET_S))) - 1
        return n if n < len(self._sent_s) else None
