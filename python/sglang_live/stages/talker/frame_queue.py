"""Codec frames of one response, between the scheduler's reports and the job that sends them."""

import asyncio

from sglang_live.errors import StageFailedError

# Frames leave the scheduler before the response's end does, but through another socket.
FRAMES_TIMEOUT_S = 5.0
# Frames per message: a vocoder takes this many at once; its buffer for a response is larger.
MOST_AT_ONCE = 256


class FrameQueue:
    """Frames of one response in order. A slow reader gets more of them at once."""

    def __init__(self) -> None:
        self._ready: list[list[int]] = []
        self._next = 0
        self._expected: int | None = None
        self._changed = asyncio.Event()
        self._all_in = asyncio.Event()
        self.n_sent = 0

    def put(self, index: int, codes: list[int]) -> None:
        if index != self._next:
            # A frame is reported once and in order; any error would be audible.
            raise AssertionError(f"frame {index} came, {self._next} was next")
        self._next += 1
        self._ready.append(codes)
        self._notify()

    async def expect(self, n_frames: int) -> None:
        """Set how many frames there are, and wait until they have come.

        Raises:
            StageFailedError: some did not come.
        """
        self._expected = n_frames
        self._notify()
        try:
            await asyncio.wait_for(self._all_in.wait(), FRAMES_TIMEOUT_S)
        except TimeoutError as error:
            raise StageFailedError(f"{self._next} of {n_frames} codec frames came") from error

    def _notify(self) -> None:
        self._changed.set()
        if self._expected is not None and self._next >= self._expected:
            self._all_in.set()

    async def next(self) -> list[list[int]]:
        """The codes of the frames that wait, at most MOST_AT_ONCE. Empty after the last frame."""
        while not self._ready:
            if self._expected is not None and self.n_sent >= self._expected:
                return []
            self._changed.clear()
            await self._changed.wait()
        frames, self._ready = self._ready[:MOST_AT_ONCE], self._ready[MOST_AT_ONCE:]
        self.n_sent += len(frames)
        return frames
