"""Microphone: sends one message per 20 ms of time (or per 40, …), speech if any, else silence.

An open microphone never stops: the server's VAD finds the end of a turn in the silence
that follows it. Owner: one per RealtimeClient with server VAD, or one per push-to-talk turn.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from sglang_live.client import clip
from sglang_live.client.utterance import append_message, silence_message
from sglang_live.clock import Clock

__all__ = ["LATE_FRAME_S", "SILENCE_MESSAGE", "Microphone", "append_message"]

SILENCE_MESSAGE = silence_message()

# The server's buffers hide less than this; more is heard as the load generator's own fault.
LATE_FRAME_S = 0.050
# Microphones of one process wake together, in four groups: waking up costs as much as sending.
PACE_GRID_S = 0.005

OnSent = Callable[[], None]


class Microphone:
    def __init__(
        self, clock: Clock, send: Callable[[str], Awaitable[None]], frames_per_message: int = 1
    ):
        self._clock = clock
        self._send = send
        self._silence = silence_message(frames_per_message)
        self._message_s = frames_per_message * clip.FRAME_S
        self._queue: deque[tuple[str, OnSent | None]] = deque()
        # A load generator that cannot keep up measures itself; these tell.
        self.frames_sent = 0
        self.frames_late = 0

    def say(self, messages: Sequence[str], marks: Mapping[int, OnSent]) -> None:
        """Queue messages; marks[n] is called once number n, counted from 1, has been sent."""
        self._queue.extend((text, marks.get(n)) for n, text in enumerate(messages, start=1))

    def drop_speech(self) -> None:
        self._queue.clear()

    async def stay_open(self) -> None:
        """Send for ever: what is queued, then silence."""
        due_s = self._clock.now_s() // PACE_GRID_S * PACE_GRID_S
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
        text, on_sent = self._queue.popleft() if self._queue else (self._silence, None)
        await self._send(text)
        if on_sent:
            on_sent()
        # Times are counted from the start, so that a late frame is followed by an early one
        # and the average pace stays real time.
        due_s += self._message_s
        await self._clock.sleep(due_s - self._clock.now_s())
        return due_s
