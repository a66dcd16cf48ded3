"""Microphone: sends one 20 ms frame every 20 ms, speech if there is any, else silence.

An open microphone never stops: the server's VAD finds the end of a turn in the silence
that follows it. Owner: one per RealtimeClient with server VAD, or one per push-to-talk turn.
"""

import base64
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sglang_live.client import clip
from sglang_live.clock import Clock


def append_message(frame: bytes) -> str:
    audio = base64.b64encode(frame).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


SILENCE_MESSAGE = append_message(bytes(clip.FRAME_BYTES))


# The server's buffers hide less than this; more is heard as the load generator's own fault.
LATE_FRAME_S = 0.050


@dataclass(frozen=True, slots=True)
class QueuedFrame:
    message: str
    on_sent: Callable[[], None] | None = None


class Microphone:
    def __init__(self, clock: Clock, send: Callable[[str], Awaitable[None]]):
        self._clock = clock
        self._send = send
        self._queue: deque[QueuedFrame] = deque()
        # A load generator that cannot keep up measures itself; these tell.
        self.frames_sent = 0
        self.frames_late = 0

    def say(self, pcm: bytes, n_speech_frames: int, on_speech_sent: Callable[[], None]) -> None:
        """Queue a clip; `on_speech_sent` is called after frame number `n_speech_frames`."""
        for number, frame in enumerate(clip.frames(pcm), start=1):
            last = number == n_speech_frames
            self._queue.append(QueuedFrame(append_message(frame), on_speech_sent if last else None))

    def drop_speech(self) -> None:
        self._queue.clear()

    async def stay_open(self) -> None:
        """Send for ever: what is queued, then silence."""
        due_s = self._clock.now_s()
        while True:
            due_s = await self._send_next(due_s)

    async def send_queued(self) -> None:
        """Send what is queued, then stop: a push-to-talk button let go."""
        due_s = self._clock.now_s()
        while self._queue:
            due_s = await self._send_next(due_s)

    async def _send_next(self, due_s: float) -> float:
        self.frames_sent += 1
        self.frames_late += self._clock.now_s() - due_s > LATE_FRAME_S
        frame = self._queue.popleft() if self._queue else QueuedFrame(SILENCE_MESSAGE)
        await self._send(frame.message)
        if frame.on_sent:
            frame.on_sent()
        # Times are counted from the start, so that a late frame is followed by an early one
        # and the average pace stays real time.
        due_s += clip.FRAME_S
        await self._clock.sleep(due_s - self._clock.now_s())
        return due_s
