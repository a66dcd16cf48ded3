"""The user's audio on the timeline of a Live session.

In: audio as it comes, ticks. Out: audio without gaps for the voice.
Owner: one Ear per session. Time passes by the server's clock: audio that does not come is silence,
unless the voice has a clock of its own.
Audio may also come faster than time; it is heard at once, up to a limit.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NoReturn

from sglang_live.gateway.audio.codec import WireFormat
from sglang_live.interaction.input_buffer import BufferFullError

# Audio may be so late before silence takes its place: longer than the pauses of most networks, and
# than the packets of most clients.
LATE_MS = 300
# Audio may be so far ahead of time.
MOST_AHEAD_MS = 30_000


class Ear:
    """
    muted: what comes is silence.
    deaf: what comes is dropped, and silence takes its place.
    """

    def __init__(self, form: WireFormat, hear: Callable[[bytes], Awaitable[None]], fills: bool):
        """fills: silence is heard in the place of audio that does not come."""
        self.muted = False
        self.deaf = False
        self._fills = fills
        self._form = form
        self._hear = hear
        self._came_ms = 0.0
        self._now_ms = 0.0
        self._starves = False  # silence has taken the place of the newest audio
        self._waiting: deque[bytes] = deque()
        self._more = asyncio.Event()

    def push(self, raw: bytes) -> None:
        """The next audio of the client, in whole samples.

        Raises:
            BufferFullError: it is too far ahead of time.
        """
        if self.deaf:
            return
        if self._came_ms + self._form.duration_ms(len(raw)) > self._now_ms + MOST_AHEAD_MS:
            raise BufferFullError(
                f"Audio is more than {MOST_AHEAD_MS // 1000} s ahead of the session's time."
            )
        self._starves = False
        if self.muted:
            raw = self._form.silence * (len(raw) // self._form.sample_bytes)
        self._take(raw)

    def pass_time(self, now_ms: float) -> None:
        """The session has lasted until now."""
        self._now_ms = now_ms
        late_ms = now_ms - self._came_ms
        if late_ms > (0 if self._starves or self.deaf else LATE_MS):
            self._starves = True
            if not self._fills:
                self._came_ms = now_ms
                return
            n_samples = self._form.n_bytes(late_ms) // self._form.sample_bytes
            self._take(self._form.silence * n_samples)

    async def run(self) -> NoReturn:
        """Pass everything on, in order."""
        while True:
            while self._waiting:
                await self._hear(self._waiting.popleft())
            self._more.clear()
            await self._more.wait()

    def _take(self, raw: bytes) -> None:
        self._came_ms += self._form.duration_ms(len(raw))
        self._waiting.append(raw)
        self._more.set()
