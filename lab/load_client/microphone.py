"""Microphone: sends one message of audio per 20 ms (or 40, …), speech if queued, else silence.

An open microphone never stops, because the server's VAD detects the end of a turn by the silence
after it. Owner: one per RealtimeClient.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from lab.load_client.utterance import silence_message
from sglang_live.client import clip
from sglang_live.clock import Clock

# The server's buffers cover smaller delays; a larger one is a fault of the load generator.
LATE_FRAME_S = 0.050
# Microphones of one process wake in four groups, because a wake-up costs as much as a send.
PACE_GRID_S = 0.005

OnSent = Callable[[], None]


class Microphone:
    """Sends audio at real-time pace.

    frames_sent, frames_late: messages sent, and those sent more than LATE_FRAME_S late.
    """

    def __init__(
        self, clock: Clock, send: Callable[[str], Awaitable[None]], frames_per_message: int = 1
    ):
        self._clock = clock
        self._send = send
        self._silence = silence_message(frames_per_message)
        self._message_s = frames_per_message * clip.FRAME_S
        self._queue: deque[tuple[str, OnSent | None]] = deque()
        # Late frames show a load generator that is too slow.
        self.frames_sent = 0
        self.frames_late = 0

    def queue(self, messages: Sequence[str], marks: Mapping[int, OnSent]) -> None:
        """Queue messages; marks[n] is called when message n, counted from 1, has been sent."""
        self._queue.extend((text, marks.get(n)) for n, text in enumerate(messages, start=1))

    def drop_speech(self) -> None:
        self._queue.clear()

    async def stay_open(self) -> None:
        """Send queued messages, and silence when there are none, without end."""
        due_s = self._clock.now_s() // PACE_GRID_S * PACE_GRID_S
        while True:
            due_s = await self._send_next(due_s)

    async def send_queued(self) -> None:
        """Send the queued messages, then return: the end of push-to-talk."""
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
        # Due times count from the start, so that after a late frame the next one comes early and
        # the average pace is real time.
        due_s += self._message_s
        await self._clock.sleep(due_s - self._clock.now_s())
        return due_s
