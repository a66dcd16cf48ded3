"""A scripted server and a fast clock for the client's tests."""

import asyncio
import base64
import json
import time

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from sglang_live.client import clip

SPEED = 100  # the fast clock's seconds per real second
# Slower, for tests of times within a response: a delay of this process must stay under a second.
STREAM_SPEED = 20
VAD_SILENCE_FRAMES = 25  # 500 ms
RESPONSE_PACKETS = 3
STREAMED_PACKETS = 20
PLAYBACK_EVENTS = ("conversation.item.truncate", "playback.ack")


class FastClock:
    """Real time, a hundred times faster, so that 20 ms frames take 0.2 ms."""

    def __init__(self, speed: float = SPEED):
        self._speed = speed

    def now_s(self) -> float:
        return time.monotonic() * self._speed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds / self._speed))


class FakeRealtimeServer:
    """A server of /v1/realtime whose `script` decides what happens at the end of a turn.

    `respond`: three packets of 100 ms each; `hang`: nothing; `close`: ends the connection;
    `empty`: completes without audio; `fail`: a failed response; `error`: an error event;
    `garbage`: a frame that is no event; `too_early`: responds in the middle of the speech and
    again at its end; `stream`: 2 s of audio, a little faster than real time, which speech of
    `onset_frames` interrupts; `strict`: the same, and refuses events about playback.
    `refuse` and `mute` fail before the session exists.
    """

    def __init__(self, script: str = "respond", onset_frames: int = 1):
        self.script = script
        self.onset_frames = onset_frames
        self._responding: asyncio.Task | None = None
        self._run_of_loud_frames = 0
        self.received: list[dict] = []
        self.paths: list[str] = []
        self.headers: list[dict] = []
        self.n_responses = 0
        self._silent_frames = 0
        self._speaking = False
        self._loud_frames = 0
        self._push_to_talk = False

    async def __aenter__(self):
        self._server = await serve(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}/v1/realtime"
        return self

    async def __aexit__(self, *_exc):
        self._server.close()
        await self._server.wait_closed()

    def types(self) -> list[str]:
        """Client events other than audio, in order."""
        kinds = [event["type"] for event in self.received]
        return [kind for kind in kinds if kind != "input_audio_buffer.append"]

    def audio(self) -> bytes:
        appends = [e for e in self.received if e["type"] == "input_audio_buffer.append"]
        return b"".join(base64.b64decode(event["audio"]) for event in appends)

    async def _serve(self, socket: ServerConnection):
        self.paths.append(socket.request.path)
        self.headers.append(dict(socket.request.headers))
        if self.script == "mute":
            await socket.wait_closed()
            return
        session = {"type": "realtime", "object": "realtime.session", "id": "sess_1"}
        await _send(socket, "session.created", session=session)
        async for text in socket:
            event = json.loads(text)
            self.received.append(event)
            await self._on_event(socket, event, session)

    async def _on_event(self, socket, event, session):
        kind = event["type"]
        if kind == "session.update" and self.script == "refuse":
            await _send_error(socket, "server_overloaded", "full: 4 of 4 sessions")
        elif kind == "session.update":
            self._push_to_talk = event["session"]["audio"]["input"]["turn_detection"] is None
            await _send(socket, "session.updated", session=session)
        elif kind == "input_audio_buffer.append" and not self._push_to_talk:
            await self._listen(socket, base64.b64decode(event["audio"]))
        elif kind == "response.create":
            await self._end_turn(socket)
        elif kind in PLAYBACK_EVENTS and self.script == "strict":
            await _send_error(socket, "invalid_value", "no such item", event["event_id"])

    async def _listen(self, socket, frame: bytes):
        loud = any(frame)
        self._silent_frames = 0 if loud else self._silent_frames + 1
        self._loud_frames += loud
        self._run_of_loud_frames = self._run_of_loud_frames + 1 if loud else 0
        if self._run_of_loud_frames >= self.onset_frames and not self._speaking:
            self._speaking = True
            await _send(socket, "input_audio_buffer.speech_started", audio_start_ms=0, item_id="i")
            await self._interrupt()
        if self.script == "too_early" and self._loud_frames == 3:
            self._loud_frames += 1
            await _send(socket, "input_audio_buffer.speech_stopped", audio_end_ms=0, item_id="i")
            await self._respond(socket)
        if self._speaking and self._silent_frames == VAD_SILENCE_FRAMES:
            self._speaking = False
            await _send(socket, "input_audio_buffer.speech_stopped", audio_end_ms=0, item_id="i")
            await self._end_turn(socket)

    async def _end_turn(self, socket):
        if self.script == "close":
            await socket.close(1011, "stage died")
        elif self.script == "error":
            await _send_error(socket, "server_overloaded", "vocoder full: 4 of 4 streams")
        elif self.script == "garbage":
            await socket.send('{"type": "response.created"}')
        elif self.script == "empty":
            await self._respond(socket, n_packets=0)
        elif self.script == "fail":
            details = {
                "type": "failed",
                "error": {"type": "server_error", "message": "talker died"},
            }
            await self._respond(socket, status="failed", status_details=details)
        elif self.script in ("stream", "strict"):
            self._responding = asyncio.create_task(self._stream(socket))
        elif self.script != "hang":
            await self._respond(socket)

    async def _interrupt(self):
        if self._responding is not None:
            self._responding.cancel()
            await asyncio.gather(self._responding, return_exceptions=True)
            self._responding = None

    async def _stream(self, socket):
        self.n_responses += 1
        response = {"id": f"resp_{self.n_responses}", "status": "in_progress"}
        item_id = f"item_{self.n_responses}"
        place = {"response_id": response["id"], "item_id": item_id, "content_index": 0}
        await _send(socket, "response.created", response=response)
        delta = base64.b64encode(np.full(2400, 1, "<i2").tobytes()).decode()
        status = {"status": "completed"}
        try:
            for _ in range(STREAMED_PACKETS):
                await _send(socket, "response.output_audio.delta", delta=delta, **place)
                await asyncio.sleep(0.08 / STREAM_SPEED)
        except asyncio.CancelledError:
            status = {"status": "cancelled", "status_details": {"reason": "turn_detected"}}
        await _send(socket, "response.done", response={**response, **status})

    async def _respond(self, socket, n_packets=RESPONSE_PACKETS, status="completed", **details):
        self.n_responses += 1
        response = {"id": f"resp_{self.n_responses}", "status": "in_progress"}
        place = {"response_id": response["id"], "item_id": "a", "content_index": 0}
        packet = np.full(2400, self.n_responses, "<i2").tobytes()
        await _send(socket, "response.created", response=response)
        for number in range(n_packets):
            word = f"word{number} "
            await _send(socket, "response.output_audio_transcript.delta", delta=word, **place)
            delta = base64.b64encode(packet).decode()
            await _send(socket, "response.output_audio.delta", delta=delta, **place)
        response = {**response, "status": status, **details}
        await _send(socket, "response.done", response=response)


async def _send(socket, kind: str, **fields):
    await socket.send(json.dumps({"type": kind, "event_id": "event_1", **fields}))


async def _send_error(socket, code: str, message: str, event_id: str | None = None):
    error = {"type": "server_error", "code": code, "message": message, "event_id": event_id}
    await _send(socket, "error", error=error)


@pytest.fixture
def fake_server():
    """The class: each test chooses a script."""
    return FakeRealtimeServer


@pytest.fixture
def fast_clock():
    return FastClock()


@pytest.fixture
def stream_clock():
    """The clock for the script `stream`."""
    return FastClock(STREAM_SPEED)


@pytest.fixture
def speech() -> bytes:
    """100 ms of loud tone and 40 ms of digital silence."""
    t = np.arange(5 * clip.FRAME_BYTES // 2) / clip.SAMPLE_RATE_HZ
    tone = (8000 * np.sin(2 * np.pi * 440 * t)).astype("<i2").tobytes()
    return tone + bytes(2 * clip.FRAME_BYTES)
