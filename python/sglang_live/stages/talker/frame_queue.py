"""Codec frames of one reply between the scheduler that reports them and the job that sends them."""

import asyncio

from sglang_live.errors import StageFailedError

# Frames leave the scheduler before the reply's end does, but on another socket.
FRAMES_TIMEOUT_S = 5.0
# In one message: a vocoder takes so many at once, and no more than it can buffer of a reply.
MOST_AT_ONCE = 256


class FrameQueue:
    """Frames of one reply in order. Sends what has come, so slow takers get larger pieces."""

    def __init__(self) -> None:
        self._ready: list[list[int]] = []
        self._next = 0
        self._expected: int | None = None
        self._changed = asyncio.Event()
        self._all_in = asyncio.Event()
        self.n_sent = 0

    def put(self, index: int, codes: list[int]) -> None:
        if index != self._next:
            # A frame is reported once and in order; anything else would be heard.
            raise AssertionError(f"frame {index} came, {self._next} was next")
        self._next += 1
        self._ready.append(codes)
        self._note()

    async def expect(self, n_frames: int) -> None:
        """Say how many there are, and wait until they have come.

        Raises:
            StageFailedError: some did not.
        """
        self._expected = n_frames
        self._note()
        try:
            await asyncio.wait_for(self._all_in.wait(), FRAMES_TIMEOUT_S)
        except TimeoutError as error:
            raise StageFailedError(f"{self._next} of {n_frames} codec frames came") from error

    def _note(self) -> None:
        self._changed.set()
        if self._expected is not None and self._next >= self._expected:
            self._all_in.set()

    async def next(self) -> list[list[int]]:
        """The codes of frames that wait, MOST_AT_ONCE of them; none after the last."""
        while not self._ready:
            if self._expected is not None and self.n_sent >= self._expected:
                return []
            self._changed.clear()
            await self._changed.wait()
        frames, self._ready = self._ready[:MOST_AT_ONCE], self._ready[MOST_AT_ONCE:]
        self.n_sent += len(frames)
        return frames
